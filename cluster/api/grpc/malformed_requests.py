"""Bytes that are no message of the type that a method takes: refused as the caller's mistake.

gRPC itself answers UNKNOWN with the text of an exception, as if the service had failed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from inspect import isasyncgenfunction
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

MESSAGE = "the request is no message of the type that this method takes"

Handler = Callable[[Any, Any], Any]

_UNREADABLE: Final = object()
"""Stands for such a request between gRPC, which decodes, and the method."""


class ReadableOnly:
    """A server as generated code sees it; what it mounts gets only what could be read."""

    def __init__(self, server: Any) -> None:
        """server: of grpc.aio, or of Ray Serve's proxy, whose handlers `refusing` has to wrap."""
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Does nothing: generated code adds the same handlers by name, which follows."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Adds them in both ways that generated code does."""
        tolerant = {name: _tolerant(handler) for name, handler in handlers.items()}
        generic = grpc.method_handlers_generic_handler(service, tolerant)
        self._server.add_generic_rpc_handlers((generic,))
        self._server.add_registered_method_handlers(service, tolerant)


def refusing(handler: Handler) -> Handler:
    """The handler of a method, for requests that could be read."""

    async def call(request: Any, grpc_context: Any) -> Any:
        await _require_readable(request, grpc_context)
        return await handler(request, grpc_context)

    async def stream(request: Any, grpc_context: Any) -> AsyncIterator[Any]:
        await _require_readable(request, grpc_context)
        async with aclosing(handler(request, grpc_context)) as messages:
            async for message in messages:
                yield message

    return stream if isasyncgenfunction(handler) else call


async def _require_readable(request: Any, grpc_context: Any) -> None:
    if request is _UNREADABLE:
        await grpc_context.abort(grpc.StatusCode.INVALID_ARGUMENT, MESSAGE)


def _tolerant(handler: Any) -> Any:
    kind = "unary_stream" if handler.response_streaming else "unary_unary"
    wrapped = {kind: refusing(getattr(handler, kind))}
    return handler._replace(request_deserializer=_reader(handler.request_deserializer), **wrapped)


def _reader(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read_if_possible(content: bytes) -> Any:
        try:
            return read(content)
        except DecodeError:
            return _UNREADABLE

    return read_if_possible
