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
from cluster.api.base.openai_errors import Failure, failure_of
from cluster.api.base.sse import event
from cluster.api.grpc.intake import PING_OPTIONS
from cluster.api.http.bodies import BoundedBody
from cluster.api.http.limits import HttpLimits
from cluster.api.http.routing import AddRoutingHint
from cluster.config.config_file import PATHS_OF_THE_SERVICE
from cluster.config.serve_config import ServeConfig
from cluster.control.peers import LOST_MESSAGE, NOT_STARTED_MESSAGE
from cluster.workers.ray.ray_internals import (
    add_grpc_proxy_options,
    is_refusal_of_proxy,
    set_grpc_proxy_host,
)
from specdec.types.errors import (
    BodyTooLargeError,
    NotReadyError,
    OverloadedError,
    SlowBodyError,
)

CALLBACK_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
CALLBACK = "cluster.api.serve_proxy.http.middlewares"
MAX_BODY_VARIABLE = "SPECDEC_HTTP_MAX_BODY_MIB"
"""The largest http_max_body_mib of the models behind a proxy."""
GRPC_HOST_VARIABLE = "SPECDEC_GRPC_HOST"
"""The host that a proxy's gRPC server listens on; all interfaces, as Serve does, if not set."""
MAX_INFLIGHT_VARIABLE = "SPECDEC_MAX_INFLIGHT_MIB"
"""The max_inflight_mib of a proxy."""

_CONNECTION = "cluster.api.http.connection:BoundedConnection"


def middlewares() -> list[Middleware]:
    """Return the middlewares of a proxy, and set the limits of its HTTP and gRPC connections."""
    add_grpc_proxy_options(PING_OPTIONS)
    if host := os.environ.get(GRPC_HOST_VARIABLE):
        set_grpc_proxy_host(host)  # its gRPC server starts after this call
    uvicorn.config.HTTP_PROTOCOLS["auto"] = _CONNECTION
    max_body_mib = int(os.environ.get(MAX_BODY_VARIABLE) or ServeConfig.http_max_body_mib)
    limits = HttpLimits(max_body_bytes=max_body_mib * 2**20, budget=proxy_budget())
    return [
        Middleware(EndResponses),
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

            scope["state"].clear()  # it is that of this connection; Serve sends the scope on
            await self._app(scope, receive_whole, send)


async def _whole(body: BoundedBody) -> Message:
    """Return the whole body as one message, or the message of a disconnect."""
    parts = []
    while (message := await body.receive())["type"] == "http.request":
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return {**message, "body": b"".join(parts)}
    return message


class EndResponses:
    """ASGI middleware that sends the errors of requests that no Router answers to the end.

    Of a lost replica the proxy sends an empty response, which the server turns into 500 as plain
    text, or an event stream without an end; of a path without an application, 404; of one that
    failed to start, 503 without `Retry-After`. They become 503, or an event of the error without
    `[DONE]`: the answer is not complete.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        observed = _ObservedResponse(scope["path"], send)
        await self._app(scope, receive, observed.send)
        # For a client that has disconnected, `send` has no effect.
        if observed.refusal:
            response = failure_response(_failure(observed.refusal), scope["path"])
            await response(scope, receive, send)
        elif observed.is_open_stream and _is_generation(scope):
            await send({"type": "http.response.body", "body": _lost(scope["path"])})


class _ObservedResponse:
    """Response that a proxy sends. refusal: the message to send in its place, if any."""

    def __init__(self, path: str, send: Send) -> None:
        self._send = send
        self._is_ours = not PATHS_OF_THE_SERVICE.isdisjoint(path.split("/"))
        self.refusal = LOST_MESSAGE  # until a response begins
        self.is_open_stream = False

    async def send(self, message: Message) -> None:
        """Send a message of the response, unless it is replaced."""
        if message["type"] == "http.response.start":
            is_replaced = self._is_ours and is_refusal_of_proxy(message)
            self.refusal = NOT_STARTED_MESSAGE if is_replaced else ""
            self.is_open_stream = _is_event_stream(message)
        elif not message.get("more_body", False):
            self.is_open_stream = False
        if not self.refusal:
            await self._send(message)


def _is_generation(scope: Scope) -> bool:
    path = scope["path"]
    is_sglang = path.endswith("/generate") and not path.endswith("/dashboard/generate")
    return scope["method"] == "POST" and ("/v1/" in path or is_sglang)


def _is_event_stream(start: Message) -> bool:
    return any(
        name.lower() == b"content-type" and bytes(value).startswith(b"text/event-stream")
        for name, value in start.get("headers", ())
    )


def _failure(message: str) -> Failure:
    return failure_of(NotReadyError(message))


def _lost(path: str) -> bytes:
    failure = _failure(LOST_MESSAGE)
    if path.endswith("/v1/messages"):
        return error_event(failure)
    return event(failure.body.model_dump_json())
