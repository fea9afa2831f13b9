"""The limits of this service in the processes of Ray Serve's HTTP proxies.

A proxy reads a request completely, whether a Router takes it or not. Serve calls `middlewares` in
each proxy if RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names it; `specdec serve` and the images set
that variable.
"""

from __future__ import annotations

import os
from functools import cache

import uvicorn.config
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.api.base.anthropic_errors import error_event, failure_response
from cluster.api.base.byte_budget import ByteBudget
from cluster.api.base.openai_errors import ApiError, failure_of
from cluster.api.base.sse import event
from cluster.api.http.bodies import BoundedBody
from cluster.api.http.limits import HttpLimits
from cluster.api.http.routing import AddRoutingHint
from cluster.config.serve_config import ServeConfig
from cluster.control.peers import LOST_MESSAGE
from specdec.types.errors import BodyTooLargeError, OverloadedError, SlowBodyError

CALLBACK_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
CALLBACK = "cluster.api.serve_proxy.http.middlewares"
MAX_BODY_VARIABLE = "SPECDEC_HTTP_MAX_BODY_MIB"
"""The largest http_max_body_mib of the models behind a proxy."""
MAX_INFLIGHT_VARIABLE = "SPECDEC_MAX_INFLIGHT_MIB"
"""The max_inflight_mib of a proxy."""

_CONNECTION = "cluster.api.http.connection:BoundedConnection"


def middlewares() -> list[Middleware]:
    """Return the middlewares of this process's proxy, and limit its connections."""
    uvicorn.config.HTTP_PROTOCOLS["auto"] = _CONNECTION
    max_body_mib = int(os.environ.get(MAX_BODY_VARIABLE) or ServeConfig.http_max_body_mib)
    limits = HttpLimits(max_body_bytes=max_body_mib * 2**20, budget=proxy_budget())
    return [
        Middleware(EndStreams),
        Middleware(ReadBodies, limits=limits),
        Middleware(AddRoutingHint),
    ]


@cache
def proxy_budget() -> ByteBudget:
    """Return the budget of a proxy's process, which its HTTP and gRPC servers share."""
    max_mib = int(os.environ.get(MAX_INFLIGHT_VARIABLE) or ServeConfig.max_inflight_mib)
    return ByteBudget(max_mib * 2**20)


class ReadBodies:
    """ASGI middleware that reads each body within the limits before the proxy does.

    Otherwise it responds 408, 413 or 429. The proxy itself would read on while it sends a Router's
    response.
    """

    def __init__(self, app: ASGIApp, limits: HttpLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._limits.budget.hold() as held:
            try:
                body = BoundedBody(scope, receive, self._limits.max_body_bytes, held)
                messages = [await _whole(body)]
            except (BodyTooLargeError, OverloadedError, SlowBodyError) as error:
                response = failure_response(failure_of(error), scope["path"])
                response.headers["connection"] = "close"
                await response(scope, receive, send)
                return

            async def receive_whole() -> Message:
                return messages.pop() if messages else await receive()

            await self._app(scope, receive_whole, send)


async def _whole(body: BoundedBody) -> Message:
    """Return the whole body as one message, or the message of a disconnect."""
    parts = []
    while (message := await body.receive())["type"] == "http.request":
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return {**message, "body": b"".join(parts)}
    return message


class EndStreams:
    """ASGI middleware that ends the event streams of lost replicas with an event of the error.

    The proxy would close the connection. No `[DONE]` follows: the answer is not complete.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        is_generation = scope.get("method") == "POST" and "/v1/" in scope.get("path", "")
        if not is_generation:
            await self._app(scope, receive, send)
            return
        is_open = False

        async def observe(message: Message) -> None:
            nonlocal is_open
            if message["type"] == "http.response.start":
                is_open = _is_event_stream(message)
            elif not message.get("more_body", False):
                is_open = False
            await send(message)

        await self._app(scope, receive, observe)
        if is_open:  # for a client that has disconnected, `send` has no effect
            await send({"type": "http.response.body", "body": _lost(scope["path"])})


def _is_event_stream(start: Message) -> bool:
    return any(
        name.lower() == b"content-type" and bytes(value).startswith(b"text/event-stream")
        for name, value in start.get("headers", ())
    )


def _lost(path: str) -> bytes:
    failure = failure_of(ApiError(503, LOST_MESSAGE, "service_unavailable"))
    if path.endswith("/v1/messages"):
        return error_event(failure)
    return event(failure.body.model_dump_json())
