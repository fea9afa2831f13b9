"""What Ray Serve's gRPC proxy says of its own accord, in the words and codes of this service.

A replica reports its own errors. When the replica itself is gone, or none is there yet, the proxy
answers, with INTERNAL or NOT_FOUND and the text of an exception.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from inspect import isasyncgenfunction
from typing import Any

from grpc import StatusCode

from cluster.errors import INTERNAL_MESSAGE
from cluster.unreadable import Handler, refusing

LOST_MESSAGE = "the replica that answered is lost; send the request again, with what came of it"
NOT_STARTED_MESSAGE = "the service is starting or stopping"

_ACTOR_IS_LOST = "actor died"
_NO_APPLICATION = "Application "

_HandlerFactory = Callable[..., Handler]


def restate_answers(_servicer: Any, server: Any) -> None:
    """Concerns the services that are mounted on a proxy's server afterwards.

    Serve calls it in the same way as the functions that mount them.
    """
    server.service_handler_factory = _restating(server.service_handler_factory)


def _restating(factory: _HandlerFactory) -> _HandlerFactory:
    def make(**what: Any) -> Handler:
        handler = refusing(factory(**what))
        return _stream(handler) if isasyncgenfunction(handler) else _call(handler)

    return make


def _stream(handler: Handler) -> Handler:
    async def stream(request: Any, grpc_context: Any) -> AsyncIterator[bytes]:
        async with aclosing(handler(request, grpc_context)) as messages:
            async for message in messages:
                yield message
        _restate(grpc_context)

    return stream


def _call(handler: Handler) -> Handler:
    async def call(request: Any, grpc_context: Any) -> bytes:
        response: bytes = await handler(request, grpc_context)
        _restate(grpc_context)
        return response

    return call


def _restate(grpc_context: Any) -> None:
    """Replaces the status that a handler has left, if it is not of our making."""
    code, details = grpc_context.code(), grpc_context.details()
    if code is StatusCode.NOT_FOUND and details.startswith(_NO_APPLICATION):
        _say(grpc_context, StatusCode.UNAVAILABLE, NOT_STARTED_MESSAGE)
    elif code is StatusCode.INTERNAL:
        is_lost = _ACTOR_IS_LOST in details
        _say(
            grpc_context,
            StatusCode.UNAVAILABLE if is_lost else StatusCode.INTERNAL,
            LOST_MESSAGE if is_lost else INTERNAL_MESSAGE,
        )


def _say(grpc_context: Any, code: StatusCode, message: str) -> None:
    grpc_context.set_code(code)
    grpc_context.set_details(message)
