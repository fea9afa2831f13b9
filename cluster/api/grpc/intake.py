"""Reception of the messages of gRPC calls: how many at once, for how long, and from which clients.

gRPC receives the message of a unary call before any code of the service runs, whatever its size and
for all calls at once. A handler of a request stream runs first and reads its messages itself, and
clients see no difference. So the interceptor here replaces the ones by the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from inspect import isasyncgenfunction
from typing import Any

import grpc
from grpc import StatusCode

from cluster.api.base.errors import OVERLOAD_RETRY_AFTER_S
from specdec.types.deadline import TimeLimit

MAX_RECEIVING = 8
"""Messages that are received at the same time. Those of small requests arrive with the call."""

PING_OPTIONS = (
    # gRPC's own limit of one ping in 5 minutes would end the calls of clients that keep their
    # connection through a load balancer open. They send one in 10 s or more.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
"""Options of a server whose clients may send keepalive pings."""

CHANNEL_OPTIONS = (
    # Otherwise gRPC enlarges the flow-control window of every call on a fast connection, and
    # buffers megabytes of each message before it is read.
    ("grpc.http2.bdp_probe", 0),
    # A connection that does not begin with HTTP/2, and one without calls, end; clients reconnect.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.http2.settings_timeout", 10_000),
    ("grpc.max_connection_idle_ms", 120_000),
    *PING_OPTIONS,
)
"""Options of a server with an intake."""

MAX_OTHER_CALLS = 100
"""Open calls of all other services together, such as watches of grpc.health.v1."""

_CHECK = "/grpc.health.v1.Health/Check"
"""Always answered, for probes."""

MAX_RECEIVING_CHECKS = 4
"""Messages of health checks that are received at the same time. Further checks are answered without
their message, with the status of the whole server."""

RECEIVE_TIMEOUT_S = 20.0
"""Limit for the arrival of a message, the wait for a place included."""


class Intake(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Receives the messages of a server's calls.

    A call without access is not received: its servicer gets an empty message, and refuses it.
    """

    def __init__(
        self,
        has_access: Callable[[str, Any], bool],
        max_calls: int,
        *,
        services: tuple[str, ...],
        max_receiving: int = MAX_RECEIVING,
        timeout_s: float = RECEIVE_TIMEOUT_S,
    ) -> None:
        """has_access: whether a call of the method may be made, by its metadata.

        max_calls: open calls of `services` together.
        """
        self._has_access = has_access
        own, self._other_seats = _Seats(max_calls), _Seats(MAX_OTHER_CALLS)
        self._seats = dict.fromkeys(services, own)
        self._places = asyncio.Semaphore(max_receiving)
        self._check_places = asyncio.Semaphore(MAX_RECEIVING_CHECKS)
        self._timeout_s = timeout_s
        self._handlers: dict[str, tuple[Any, Any]] = {}  # with the server's own, by method

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        """Return the handler of a call, which receives its message itself."""
        handler = await continuation(details)
        if handler is None:
            return None
        known, own = self._handlers.get(details.method, (None, None))
        if known is not handler:
            own = self._receiver(handler, details.method)
            self._handlers[details.method] = handler, own
        return own

    def _receiver(self, handler: Any, method: str) -> Any:
        """Return the handler that takes the place of the server's own for a method."""
        if method == _CHECK:
            return self._receiving_check(handler)
        seats = self._seats.get(method.split("/")[1], self._other_seats)
        if handler.request_streaming:
            return _seated(handler, seats)
        return _seated(self._receiving(handler, method), seats)

    def _receiving(self, handler: Any, method: str) -> Any:
        """Return a handler of a request stream that receives the message for `handler`."""
        respond = _responding(handler.unary_stream or handler.unary_unary)

        async def call(_messages: Any, context: Any) -> Any:
            if self._has_access(method, context.invocation_metadata()):
                request = await self._receive(context, self._places)
            else:
                request = handler.request_deserializer(b"")
            return await respond(request, context)

        make = grpc.stream_stream_rpc_method_handler
        if not handler.response_streaming:
            make = grpc.stream_unary_rpc_method_handler
        return make(call, handler.request_deserializer, handler.response_serializer)

    def _receiving_check(self, handler: Any) -> Any:
        """Return a handler of health checks that never waits for a place."""

        async def call(_messages: Any, context: Any) -> Any:
            if self._check_places.locked():
                request = handler.request_deserializer(b"")
            else:
                request = await self._receive(context, self._check_places)
            return await handler.unary_unary(request, context)

        return grpc.stream_unary_rpc_method_handler(
            call, handler.request_deserializer, handler.response_serializer
        )

    async def _receive(self, context: Any, places: asyncio.Semaphore) -> Any:
        """Read the message from the context: grpc's iterator would keep it in a reference cycle."""
        try:
            with TimeLimit(self._timeout_s, TimeoutError):
                async with places:
                    message = await context.read()
        except TimeoutError:
            text = f"the message of the call did not arrive within {self._timeout_s:g} s"
            await context.abort(StatusCode.DEADLINE_EXCEEDED, text)
        if message is grpc.aio.EOF:
            await context.abort(StatusCode.INVALID_ARGUMENT, "the call has no message")
        return message


class _Seats:
    """Number of open calls, with a limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_taken = 0


def _seated(handler: Any, seats: _Seats) -> Any:
    """Return the handler of a request stream, which refuses calls beyond the limit."""
    kind = "stream_stream" if handler.response_streaming else "stream_unary"
    respond = _responding(getattr(handler, kind))

    async def call(messages: Any, context: Any) -> Any:
        if seats.num_taken >= seats.limit:
            hint = (("retry-after-s", str(OVERLOAD_RETRY_AFTER_S)),)
            text = f"too many open calls (limit {seats.limit})"
            await context.abort(StatusCode.RESOURCE_EXHAUSTED, text, hint)
        seats.num_taken += 1
        try:
            return await respond(messages, context)
        finally:
            seats.num_taken -= 1

    return handler._replace(**{kind: call})


def _responding(behaviour: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Awaitable[Any]]:
    """Return a coroutine function for what may be a generator of responses."""
    if not isasyncgenfunction(behaviour):
        return behaviour

    async def write_all(request: Any, context: Any) -> None:
        async with aclosing(behaviour(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    return write_all
