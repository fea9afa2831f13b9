"""Connection to a service, and the errors of its calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self

import grpc
from grpc import StatusCode

from specdec.types.errors import InvalidValueError

MAX_ATTEMPTS = 4
"""Attempts of a call: the first, and three after pauses of up to 0.2, 0.4 and 0.8 s."""

_READ_ONLY = (
    "GetSpeculation",
    "GetStatus",
    "ListReplicas",
    "ListDrafters",
    "ListAdapters",
    "ListAuditLog",
)
_RETRIED = [
    {"service": "specdec.v1.InferenceService"},
    *({"service": "specdec.v1.AdminService", "method": method} for method in _READ_ONLY),
]
"""Idempotent calls, which may run twice."""

_RETRY_POLICY = {
    "maxAttempts": MAX_ATTEMPTS,
    "initialBackoff": "0.2s",
    "maxBackoff": "2s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}
_OPTIONS = [
    # The service limits what it sends; gRPC's own limit of 4 MiB would cut off long answers.
    ("grpc.max_receive_message_length", -1),
    (
        "grpc.service_config",
        json.dumps({"methodConfig": [{"name": _RETRIED, "retryPolicy": _RETRY_POLICY}]}),
    ),
]

_ADDRESS = "host:port of the gRPC API, such as 127.0.0.1:9000"
_URL_SCHEMES = ("http://", "https://", "grpc://", "grpcs://")


@dataclass(frozen=True)
class Destination:
    """Address of a service and options of all calls. Raises InvalidValueError without secrets.

    address: host:port. timeout_s: of each call, retries included; None: no limit.
    tls_ca_file: CA certificates (PEM) that verify the service; None: no TLS. bearer: an API key or
    the operators' token, for a connection with TLS or one that stays on the machine.
    tls_server_name: name in the service's certificate, if it differs from the address.
    """

    address: str
    timeout_s: float | None
    tls_ca_file: Path | None = None
    bearer: str | None = None
    tls_server_name: str | None = None

    def __post_init__(self) -> None:
        if ":" not in self.address:
            raise InvalidValueError("address", self.address, _ADDRESS)
        if self.address.lower().startswith(_URL_SCHEMES):
            limit = f"{_ADDRESS}, without a scheme"
            raise InvalidValueError("address", self.address, limit)
        bearer = self.bearer or ""
        if not (bearer.isascii() and (bearer == "" or bearer.isprintable())):
            limit = "printable ASCII characters"
            raise InvalidValueError("API key or token", "not shown", limit)

    def __repr__(self) -> str:
        return f"Destination({self.address!r})"

    @property
    def metadata(self) -> Sequence[tuple[str, str]] | None:
        """Metadata of each call."""
        return [("authorization", f"Bearer {self.bearer}")] if self.bearer else None

    def open(self, library: ModuleType) -> Any:
        """Return a channel of `grpc` or of `grpc.aio`, which connects at the first call."""
        if self.tls_ca_file is None:
            return library.insecure_channel(self.address, _OPTIONS)
        try:
            credentials = grpc.ssl_channel_credentials(self.tls_ca_file.read_bytes())
        except OSError as error:
            limit = "a file to read"
            raise InvalidValueError("tls_ca_file", str(self.tls_ca_file), limit) from error
        name = self.tls_server_name
        named = [("grpc.ssl_target_name_override", name)] if name else []
        return library.secure_channel(self.address, credentials, [*_OPTIONS, *named])

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Raise ClientError in place of gRPC's errors."""
        try:
            yield
        except grpc.RpcError as error:
            code, details = error.code(), " ".join((error.details() or "").split())
            message = _message(code, details, self.address, self.timeout_s)
            raise ClientError(code, message) from error


class Connection:
    """Connection that is opened at the first call."""

    _library: ClassVar[ModuleType] = grpc

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self._channel = destination.open(self._library)

    @property
    def address(self) -> str:
        """host:port."""
        return self._destination.address

    @property
    def timeout_s(self) -> float | None:
        """Seconds that each call may take, retries included; None: no limit."""
        return self._destination.timeout_s


class BlockingConnection(Connection):
    """Connection of a client that blocks. A context manager; thread-safe."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        self._channel.close()

    def _call(self, method: Any, request: Any, timeout_s: float | None = None) -> Any:
        """Return the response. timeout_s: in place of the connection's."""
        timeout_s = timeout_s or self.timeout_s
        with self._destination.reported():
            return method(request, timeout=timeout_s, metadata=self._destination.metadata)


# Prefixes of gRPC's messages without a connection; the service's messages never have them.
_NOT_CONNECTED = ("failed to connect to", "errors resolving", "DNS resolution failed")


class ClientError(Exception):
    """A call that failed. `code` is the gRPC status; `message` is one line, meant to be read."""

    def __init__(self, code: StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


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
    if "handshake failed" in details.lower():
        return f"the TLS handshake with {address} failed; check the address and the CA file"
    if "hostname verification" in details.lower():
        return f"the certificate of {address} is for another name; set tls_server_name to that name"
    return f"no service answers at {address}; start one with `specdec serve`"
