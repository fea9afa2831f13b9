"""What Ray Serve's gRPC proxy says of its own accord, in the words and codes of this service.

A replica reports its own errors. When the replica itself is gone, or none is there yet, the proxy
answers, with INTERNAL or NOT_FOUND and the text of an exception.

A call that names no application goes to ours with the route prefix "/", or else to the first by
name. Its Routers pass it on by its `model`; Serve by itself would refuse it as soon as there are
two.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from inspect import isasyncgenfunction
from typing import Any

from grpc import StatusCode

from cluster.api.errors import INTERNAL_MESSAGE
from cluster.api.grpc.malformed_requests import Handler, refusing
from cluster.control.peers import LOST_MESSAGE, ROUTER
from cluster.workers.ray_internals import HandlerFactory, ListRoutes, wrap_proxy_handlers

NOT_STARTED_MESSAGE = "the service is starting or stopping"

_ACTOR_IS_LOST = "actor died"
_NO_APPLICATION = "Application "
_APPLICATION = "application"


def restate_answers(_servicer: Any, server: Any) -> None:
    """Concerns the services that are mounted on a proxy's server afterwards.

    Serve calls it in the same way as the functions that mount them.
    """
    wrap_proxy_handlers(server, _restating)


def _restating(factory: HandlerFactory, routes: ListRoutes) -> HandlerFactory:
    def make(**what: Any) -> Handler:
        handler = refusing(factory(**what))
        return _stream(handler, routes) if isasyncgenfunction(handler) else _call(handler, routes)

    return make


class _Context:
    """grpc's context of a call, with the application that was left out."""

    def __init__(self, grpc_context: Any, routes: ListRoutes) -> None:
        self._context = grpc_context
        metadata = tuple(grpc_context.invocation_metadata() or ())
        if not any(key == _APPLICATION for key, _ in metadata):
            metadata += tuple((_APPLICATION, name) for name in _default_application(routes))
        self._metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def _default_application(routes: ListRoutes) -> list[str]:
    """One name of ours, or none. Serve's proxy is everybody's, and so may be the route "/"."""
    names = [
        (each.prefix != "/", each.application) for each in routes() if each.deployment == ROUTER
    ]
    return [name for _, name in sorted(names)[:1]]


def _stream(handler: Handler, routes: ListRoutes) -> Handler:
    async def stream(request: Any, grpc_context: Any) -> AsyncIterator[bytes]:
        async with aclosing(handler(request, _Context(grpc_context, routes))) as messages:
            async for message in messages:
                yield message
        _restate(grpc_context)

    return stream


def _call(handler: Handler, routes: ListRoutes) -> Handler:
    async def call(request: Any, grpc_context: Any) -> bytes:
        response: bytes = await handler(request, _Context(grpc_context, routes))
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
