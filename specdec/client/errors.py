"""Errors of a client's calls."""

from __future__ import annotations

import grpc
from grpc import StatusCode

from specdec.types.errors import REQUEST_ABORTED

# Prefixes of gRPC's messages without a connection; the service's messages never have them.
_NOT_CONNECTED = ("failed to connect to", "errors resolving", "DNS resolution failed")

_HTTP_SERVER = "http1.x server"
_NO_HTTP2 = "missing selected ALPN property"  # of a server with TLS
HTTP_PORT = "an HTTP port; use that of the gRPC API, 9000 by default"
"""The end of the message for a call to the other port."""


class ClientError(Exception):
    """A call that failed. `code` is the gRPC status; `message` is one line, meant to be read."""

    def __init__(self, code: StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def client_error(error: grpc.RpcError, address: str, timeout_s: float | None) -> ClientError:
    """Return the error of a call to `address`; timeout_s: of the call, as None where it had none.

    A call that the service cancels, as it does when it stops, is one that found it unavailable,
    unless its request was aborted.
    """
    code, details = error.code(), " ".join((error.details() or "").split())
    if code is StatusCode.CANCELLED and details != REQUEST_ABORTED:
        code, details = StatusCode.UNAVAILABLE, "it cancelled the call"
    return ClientError(code, _message(code, details, address, timeout_s))


def overdue_error(address: str, timeout_s: float | None) -> ClientError:
    """Return the error of a call whose deadline has passed."""
    code = StatusCode.DEADLINE_EXCEEDED
    return ClientError(code, _message(code, "", address, timeout_s))


def closed_error() -> ClientError:
    """Return the error of a call on a client that was closed."""
    return ClientError(StatusCode.CANCELLED, "the client was closed")


def _message(code: StatusCode, details: str, address: str, timeout_s: float | None) -> str:
    if code is StatusCode.DEADLINE_EXCEEDED:
        limit = "the deadline" if timeout_s is None else f"{timeout_s:g} s"
        return f"{address} did not complete its response within {limit}"
    if code is StatusCode.UNIMPLEMENTED:
        return f"{address} is not a specdec service, or runs another version of specdec"
    if code is not StatusCode.UNAVAILABLE:
        return details or f"{address} returned {code.name} without a message"
    if not details.startswith(_NOT_CONNECTED):
        return f"the service at {address} is unavailable: {details}"
    if _HTTP_SERVER in details or _NO_HTTP2 in details:
        return f"{address} is {HTTP_PORT}"
    if "handshake failed" in details.lower():
        return f"the TLS handshake with {address} failed; check the address and the CA file"
    if "hostname verification" in details.lower():
        fix = "call it by that name, or set tls_server_name"
        return f"the certificate of {address} is for another name; {fix}"
    if details.endswith("Socket closed"):
        return f"{address} closed the connection; if it uses TLS, set tls_ca_file"
    return f"no service answers at {address}; start one with `specdec serve`"
