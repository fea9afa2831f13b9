"""One connection to a service, and what can be said of calls that fail on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc

from specdec.client.errors import client_error
from specdec.errors import InvalidValueError

# The service limits what it sends; gRPC's own limit of 4 MiB would cut off long answers.
_OPTIONS = [("grpc.max_receive_message_length", -1)]


class Connection:
    """Made at the first call. A context manager; thread-safe."""

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float | None,
        tls_ca_file: Path | None = None,
        tls_server_name: str | None = None,
    ) -> None:
        """Raises InvalidValueError for an address without a port or a CA file that is not there.

        address: host:port. timeout_s: what each call has in all, in seconds; None: no limit.
        tls_ca_file: certificates (PEM) of who may vouch for the service; None: no TLS.
        tls_server_name: in the service's certificate, where that has not the address's own.
        """
        if ":" not in address:
            raise InvalidValueError("address", address, "of the form host:port")
        self.address = address
        self.timeout_s = timeout_s
        self._channel = _open_channel(address, tls_ca_file, tls_server_name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; calls under way are cancelled."""
        self._channel.close()

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise client_error(error, self.address, self.timeout_s) from error


def _open_channel(
    address: str, tls_ca_file: Path | None, tls_server_name: str | None
) -> grpc.Channel:
    if tls_ca_file is None:
        return grpc.insecure_channel(address, _OPTIONS)
    try:
        credentials = grpc.ssl_channel_credentials(tls_ca_file.read_bytes())
    except OSError as error:
        raise InvalidValueError("tls_ca_file", str(tls_ca_file), "a file to read") from error
    named = [("grpc.ssl_target_name_override", tls_server_name)] if tls_server_name else []
    return grpc.secure_channel(address, credentials, [*_OPTIONS, *named])
