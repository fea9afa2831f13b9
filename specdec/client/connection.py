"""Connection to a service, and its calls."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self

import grpc

from specdec.client.attempts import RETRY_DELAYS_S, Attempts
from specdec.client.errors import ClientError, client_error, closed_error, overdue_error
from specdec.client.watchdog import receive
from specdec.types.errors import InvalidValueError
from specdec.types.network import bypasses_proxy, trusting

_OPTIONS = [
    # The service limits what it sends; gRPC's own limit of 4 MiB would cut off long answers.
    ("grpc.max_receive_message_length", -1),
    # Calls are retried here. With gRPC's own retries a stream whose service stops may wait for a
    # message that gRPC never delivers, past its deadline.
    ("grpc.enable_retries", 0),
    # A service that is back is found within the attempts of a call.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 4000),
    # A peer that has vanished ends also calls without a deadline. Servers close a connection with
    # pings at intervals below 5 minutes.
    ("grpc.keepalive_time_ms", 310_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
]
_BLOCKING_OPTIONS = [("SingleThreadedUnaryStream", 1)]
"""The thread that receives a stream also polls it; otherwise a second thread would."""

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
    tls_ca_file: Path | str | None = None
    bearer: str | None = None
    tls_server_name: str | None = None

    def __post_init__(self) -> None:
        if ":" not in self.address:
            raise InvalidValueError("address", self.address, _ADDRESS)
        if self.address.lower().startswith(_URL_SCHEMES):
            limit = f"{_ADDRESS}, without a scheme"
            raise InvalidValueError("address", self.address, limit)
        if self.timeout_s is not None and not self.timeout_s > 0:
            limit = "a number of seconds above 0, or None for no limit"
            raise InvalidValueError("timeout_s", self.timeout_s, limit)
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
        options = [*_OPTIONS, *(_BLOCKING_OPTIONS if library is grpc else ())]
        if bypasses_proxy(self.address):
            options.append(("grpc.enable_http_proxy", 0))
        if self.tls_ca_file is None:
            return library.insecure_channel(self.address, options)
        _, pem = trusting("tls_ca_file", self.tls_ca_file)  # gRPC would find no service
        credentials = grpc.ssl_channel_credentials(pem)
        name = self.tls_server_name
        named = [("grpc.ssl_target_name_override", name)] if name else []
        return library.secure_channel(self.address, credentials, [*options, *named])


class Connection:
    """Connection that is opened at the first call."""

    _library: ClassVar[ModuleType] = grpc

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self._channel = destination.open(self._library)
        self._is_closed = False

    @property
    def address(self) -> str:
        """host:port."""
        return self._destination.address

    @property
    def timeout_s(self) -> float | None:
        """Seconds that each call may take, retries included; None: no limit."""
        return self._destination.timeout_s

    @contextmanager
    def _reported(self, timeout_s: float | None) -> Iterator[None]:
        """Raise ClientError in place of the errors of a call. timeout_s: of the call."""
        if self._is_closed:
            raise closed_error()
        try:
            yield
        except grpc.RpcError as error:
            if self._is_closed:
                raise closed_error() from error
            raise client_error(error, self.address, timeout_s) from error
        except (TimeoutError, grpc.FutureTimeoutError):
            raise overdue_error(self.address, timeout_s) from None
        except Exception as error:
            if self._is_closed:  # by another thread or task, which gRPC reports as a misuse
                raise closed_error() from error
            raise


class BlockingConnection(Connection):
    """Connection of a client that blocks. A context manager; thread-safe."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        self._is_closed = True
        self._channel.close()

    def _is_repeatable(self, request: Any) -> bool:
        """Return whether the service may run the call of this request twice."""
        return True

    def _call(self, method: Any, request: Any, timeout_s: float | None = None) -> Any:
        """Return the response. timeout_s: in place of the connection's."""
        delays_s = RETRY_DELAYS_S if self._is_repeatable(request) else ()
        attempts = Attempts(timeout_s or self.timeout_s, delays_s)
        while True:
            try:
                return self._attempt(method, request, attempts)
            except ClientError as error:
                delay_s = attempts.delay_s(error)
            time.sleep(delay_s)

    def _attempt(self, method: Any, request: Any, attempts: Attempts) -> Any:
        with self._reported(attempts.timeout_s):
            metadata = self._destination.metadata
            call = method.future(request, timeout=attempts.left_s, metadata=metadata)
            try:
                return call.result(timeout=attempts.wait_s)
            finally:
                call.cancel()  # no effect on a call that has ended

    def _messages(
        self, method: Any, request: Any, attempts: Attempts, stall_s: float | None = None
    ) -> Generator[Any, None, None]:
        """Yield the messages of a stream; stall_s: limit of the time until the next one."""
        with self._reported(attempts.timeout_s if stall_s is None else stall_s):
            metadata = self._destination.metadata
            call = method(request, timeout=attempts.left_s, metadata=metadata)
            with closing(receive(call, attempts, stall_s)) as messages:
                yield from messages
