"""The limits of this service in the processes of Ray Serve's HTTP proxies.

A proxy reads a request completely, whether a Router takes it or not. Serve calls `middlewares` in
each proxy if RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names it; `specdec serve` and the images set
that variable.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import uvicorn.config
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.api.http.bodies import BoundedBody
from cluster.api.openai.errors import failure_of
from cluster.config.serve_config import ServeConfig
from specdec.types.errors import BodyTooLargeError

CALLBACK_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
CALLBACK = "cluster.api.http.serve_proxy.middlewares"
MAX_BODY_VARIABLE = "SPECDEC_HTTP_MAX_BODY_MIB"
"""The largest http_max_body_mib of the models behind a proxy."""

_CONNECTION = "cluster.api.http.connection:BoundedConnection"


def middlewares() -> list[Middleware]:
    """Return the middlewares of this process's proxy, and limit its connections."""
    uvicorn.config.HTTP_PROTOCOLS["auto"] = _CONNECTION
    max_mib = int(os.environ.get(MAX_BODY_VARIABLE) or ServeConfig.http_max_body_mib)
    return [Middleware(ReadBodies, get_max_bytes=lambda: max_mib * 2**20)]


class ReadBodies:
    """ASGI middleware that reads each body within a limit before the proxy does, else responds 413.

    The proxy would read on while it sends a Router's response.
    """

    def __init__(self, app: ASGIApp, get_max_bytes: Callable[[], int]) -> None:
        """get_max_bytes: called for each request."""
        self._app = app
        self._get_max_bytes = get_max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = BoundedBody(scope, receive, self._get_max_bytes())
            first = await _whole(body)
        except BodyTooLargeError as error:
            await failure_of(error).respond()(scope, receive, send)
            return
        messages = [first]

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
