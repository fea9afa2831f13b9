"""Status codes and messages of Ray Serve's gRPC proxy, replaced by those of this service.

A replica reports its own errors. When the replica is lost, or none has started, the proxy responds
with INTERNAL or NOT_FOUND and the text of an exception.

A call that names no application goes to ours with the route prefix "/", or else to the first by
name, whose Routers forward it by its `model`. Serve would refuse it as soon as there are two
applications.
"""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from inspect import isasyncgenfunction
from typing import Any

from grpc import StatusCode

from cluster.api.base.byte_budget import ByteBudget, HeldBytes
from cluster.api.base.errors import INTERNAL_MESSAGE
from cluster.api.grpc.routing import with_hint
from cluster.api.grpc.status import (
    Handler,
    hide_reported_statuses,
    refuse_malformed,
    reporting_to,
)
from cluster.api.serve_proxy.http import proxy_budget
from cluster.control.peers import LOST_MESSAGE, NOT_STARTED_MESSAGE, ROUTER
from cluster.workers.ray.ray_internals import HandlerFactory, ListRoutes, wrap_proxy_handlers
from specdec.types.errors import GENERATION_STOPPED

MAX_MESSAGE_VARIABLE = "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"
"""Serve's limit on a message of its gRPC proxies, in bytes; 2 GiB if it is not set."""

_TEXTS_OF_LOSS = ("actor died", "worker died", "is unavailable:", os.strerror(errno.EMFILE))
"""Parts of the texts of errors after which a retry helps: the Router's process was lost, does not
respond, or is out of file descriptors."""
_NO_APPLICATION = "Application "
_APPLICATION = "application"


def restate_answers(_servicer: Any, server: Any) -> None:
    """Replace the statuses of the services that are mounted on a proxy's server afterwards.

    Serve calls this function in the same way as those that mount the services.
    """
    hide_reported_statuses()
    wrap_proxy_handlers(server, _restating)


def _restating(factory: HandlerFactory, routes: ListRoutes) -> HandlerFactory:
    def make(**method: Any) -> Handler:
        handler = _holding(factory(**method), proxy_budget())
        return refuse_malformed(handler, lambda context: _Context(context, routes), _restate)

    return make


def _holding(handler: Handler, budget: ByteBudget) -> Handler:
    """Return a handler that refuses requests beyond the budget for all of them.

    It also adds the routing hint of a request to the context that the proxy gets.
    """

    def hold(request: Any, grpc_context: _Context) -> HeldBytes | None:
        with reporting_to(grpc_context):
            return budget.hold(request.ByteSize())
        return None

    async def call(request: Any, grpc_context: _Context) -> Any:
        held = hold(request, grpc_context)
        if held is None:
            return b""
        with held:
            return await handler(request, grpc_context.routed_by(request))

    async def stream(request: Any, grpc_context: _Context) -> AsyncGenerator[Any, None]:
        held = hold(request, grpc_context)
        if held is None:
            return
        with held:
            async with aclosing(handler(request, grpc_context.routed_by(request))) as messages:
                async for message in messages:
                    yield message

    return stream if isasyncgenfunction(handler) else call


class _Context:
    """Context of a call, with the default application where the client names none."""

    def __init__(self, grpc_context: Any, routes: ListRoutes) -> None:
        self._context = grpc_context
        metadata = tuple(grpc_context.invocation_metadata() or ())
        if not any(key == _APPLICATION for key, _ in metadata):
            metadata += tuple((_APPLICATION, name) for name in _default_application(routes))
        self._metadata = metadata

    def routed_by(self, request: Any) -> _Context:
        """Add the routing hint of the request."""
        self._metadata = with_hint(self._metadata, request)
        return self

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def _default_application(routes: ListRoutes) -> list[str]:
    """Return one application of ours, or none: others may share the proxy and have route "/"."""
    names = [
        (each.prefix != "/", each.application) for each in routes() if each.deployment == ROUTER
    ]
    return [name for _, name in sorted(names)[:1]]


def _restate(grpc_context: Any) -> None:
    """Replace the status that a handler has set, if it is not one of ours."""
    code, details = grpc_context.code(), grpc_context.details()
    if code is StatusCode.NOT_FOUND and details.startswith(_NO_APPLICATION):
        _set_status(grpc_context, StatusCode.UNAVAILABLE, NOT_STARTED_MESSAGE)
    elif code is StatusCode.INTERNAL:
        if any(text in details for text in _TEXTS_OF_LOSS):
            _set_status(grpc_context, StatusCode.UNAVAILABLE, LOST_MESSAGE)
        elif not details.startswith(GENERATION_STOPPED):
            _set_status(grpc_context, StatusCode.INTERNAL, INTERNAL_MESSAGE)


def _set_status(grpc_context: Any, code: StatusCode, message: str) -> None:
    grpc_context.set_code(code)
    grpc_context.set_details(message)
