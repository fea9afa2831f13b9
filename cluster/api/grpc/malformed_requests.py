"""Requests that are no message of the type that a method takes, refused as INVALID_ARGUMENT.

gRPC itself returns UNKNOWN with the text of an exception, as if the service had failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import aclosing
from inspect import isasyncgenfunction
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

MESSAGE = "the request is no message of the type that this method takes"

Handler = Callable[[Any, Any], Any]

_MALFORMED: Final = object()
"""Stands for such a request between gRPC, which decodes, and the handler."""


class ReadableOnly:
    """Server, as generated code uses it, whose methods get only requests that could be decoded."""

    def __init__(self, server: Any) -> None:
        """server: of grpc.aio, or of Ray Serve's proxy, whose handlers need `refusing` as well."""
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Do nothing: generated code adds the same handlers by name, which follows."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Add the handlers in both ways that generated code does."""
        tolerant = {name: _tolerant(handler) for name, handler in handlers.items()}
        generic = grpc.method_handlers_generic_handler(service, tolerant)
        self._server.add_generic_rpc_handlers((generic,))
        self._server.add_registered_method_handlers(service, tolerant)


def refusing(
    handler: Handler,
    wrap_context: Callable[[Any], Any] = lambda grpc_context: grpc_context,
    finish: Callable[[Any], None] = lambda grpc_context: None,
) -> Handler:
    """Return a handler that aborts the call if the request could not be decoded.

    wrap_context: returns the context that `handler` gets. finish: called with grpc's own context
    when the handler has ended. A stream is written to the context, which takes the place of grpc's
    loop over a generator.
    """

    async def call(request: Any, grpc_context: Any) -> Any:
        await _require_readable(request, grpc_context)
        response = await handler(request, wrap_context(grpc_context))
        finish(grpc_context)
        return response

    async def stream(request: Any, grpc_context: Any) -> None:
        await _require_readable(request, grpc_context)
        async with aclosing(handler(request, wrap_context(grpc_context))) as messages:
            async for message in messages:
                await grpc_context.write(message)
        finish(grpc_context)

    return stream if isasyncgenfunction(handler) else call


async def _require_readable(request: Any, grpc_context: Any) -> None:
    if request is _MALFORMED:
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
            return _MALFORMED

    return read_if_possible
