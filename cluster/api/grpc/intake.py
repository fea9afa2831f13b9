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

MAX_RECEIVING = 8
"""Messages that are received at the same time. Those of small requests arrive with the call."""

CHANNEL_OPTIONS = (("grpc.http2.bdp_probe", 0),)
"""For a server with an intake. Otherwise gRPC enlarges the flow-control window of every call on a
fast connection, and buffers megabytes of each message before it is read."""

RECEIVE_TIMEOUT_S = 20.0
"""Limit for the arrival of a message, the wait for a place included."""


class Intake(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Receives the messages of a server's calls.

    A call without access is not received: its servicer gets an empty message, and refuses it.
    """

    def __init__(
        self,
        has_access: Callable[[str, Any], bool],
        *,
        max_receiving: int = MAX_RECEIVING,
        timeout_s: float = RECEIVE_TIMEOUT_S,
    ) -> None:
        """has_access: whether a call of the method may be made, by its metadata."""
        self._has_access = has_access
        self._places = asyncio.Semaphore(max_receiving)
        self._timeout_s = timeout_s

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        """Return the handler of a call, which receives its message itself."""
        handler = await continuation(details)
        if handler is None or handler.request_streaming:
            return handler
        coding = (handler.request_deserializer, handler.response_serializer)

        async def receive(context: Any) -> Any:
            if not self._has_access(details.method, details.invocation_metadata):
                return handler.request_deserializer(b"")
            return await self._receive(context)

        async def call(_messages: Any, context: Any) -> Any:
            return await handler.unary_unary(await receive(context), context)

        async def stream(_messages: Any, context: Any) -> None:
            request = await receive(context)
            if not isasyncgenfunction(handler.unary_stream):
                await handler.unary_stream(request, context)
                return
            async with aclosing(handler.unary_stream(request, context)) as responses:
                async for response in responses:
                    await context.write(response)

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, *coding)
        return grpc.stream_unary_rpc_method_handler(call, *coding)

    async def _receive(self, context: Any) -> Any:
        """Read the message from the context: grpc's iterator would keep it in a reference cycle."""
        try:
            async with asyncio.timeout(self._timeout_s):
                async with self._places:
                    message = await context.read()
        except TimeoutError:
            text = f"the message of the call did not arrive within {self._timeout_s:g} s"
            await context.abort(StatusCode.DEADLINE_EXCEEDED, text)
        if message is grpc.aio.EOF:
            await context.abort(StatusCode.INVALID_ARGUMENT, "the call has no message")
        return message
