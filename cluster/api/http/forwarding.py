"""Forwarding of HTTP requests to the application that serves their model.

The unchanged request goes to a Router of that application and through all of its HTTP interface,
which checks the key and the limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.control.peers import Applications, PeerApplication
from cluster.workers.ray.ray_internals import session_header

_MAX_BUFFERED_MESSAGES = 16
"""Messages of a response that wait for a slow client before the application is paused."""

_MARK = "specdec.is_forwarded"

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True)
class ForwardedRequest:
    """A request. path: without the prefix of the application that received it.

    body: the whole, or of a front end what its Router reads. client: host and port, if known.
    """

    method: str
    path: str
    query: bytes
    headers: Headers = field(repr=False)  # with the credential of the client
    body: bytes = field(repr=False)
    client: tuple[str, int] | None = None

    @classmethod
    def of(cls, request: Request, body: bytes) -> ForwardedRequest:
        """Return a request with what has been read of its body."""
        scope = request.scope
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        headers = tuple((bytes(name), bytes(value)) for name, value in scope["headers"])
        client = scope.get("client")
        return cls(request.method, path, scope["query_string"], headers, body, client)

    @property
    def scope(self) -> Scope:
        """ASGI scope of the request."""
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "root_path": "",
            "headers": list(self.headers),
            "client": self.client,
            "server": None,
            _MARK: True,
        }


def is_forwarded(scope: Scope) -> bool:
    """Return whether another Router or a front end has sent a request here."""
    return _MARK in scope


async def find_peer(
    applications: Applications | None, request: Request, model: str
) -> PeerApplication | None:
    """Return the application to forward to; None for this one.

    Raises UnknownModelError if no application serves the model, and for a forwarded request if this
    one does not: it is not forwarded in a loop.
    """
    if applications is None:
        return None
    if is_forwarded(request.scope):
        applications.require_own(model)
        return None
    return await applications.find(model)


@dataclass(frozen=True)
class ResponseHead:
    """Status and headers of a response."""

    status: int
    headers: Headers


async def answer(
    app: ASGIApp, request: ForwardedRequest
) -> AsyncGenerator[ResponseHead | bytes, None]:
    """Yield the head of the response, then its body in parts.

    Closing it cancels the request, and so does the head of the response to HEAD.
    """
    messages: asyncio.Queue[Message | Exception | None] = asyncio.Queue(_MAX_BUFFERED_MESSAGES)

    async def run() -> None:
        try:
            await app(request.scope, _receiver(request.body), messages.put)
        except Exception as error:
            await messages.put(error)
        else:
            await messages.put(None)

    running = asyncio.create_task(run())
    try:
        while (message := await messages.get()) is not None:
            if isinstance(message, Exception):
                raise message
            if message["type"] == "http.response.start":
                yield ResponseHead(message["status"], tuple(message["headers"]))
                if request.method == "HEAD":
                    return
            elif message.get("body"):
                yield message["body"]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def _receiver(body: bytes) -> Receive:
    """Return the body as one message. No disconnect follows it: that cancels the task instead."""
    parts = [body]

    async def receive() -> Message:
        if not parts:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": parts.pop(), "more_body": False}

    return receive


class ForwardedResponse(StreamingResponse):
    """Response of another Router, which is cancelled there when the client disconnects."""

    def __init__(self, head: ResponseHead, body: AsyncGenerator[bytes, None]) -> None:
        super().__init__(body, head.status)
        self.raw_headers = list(head.headers)
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response part by part."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._body.aclose()


async def forward(peer: PeerApplication, request: ForwardedRequest) -> ForwardedResponse:
    """Return the response of a Router of another application. Raises NotReadyError without one."""
    session_id = dict(request.headers).get(session_header().encode(), b"").decode("latin-1")
    messages = peer.stream("answer_request", request, session_id=session_id)
    try:
        head = await anext(messages)
    except BaseException:
        await messages.aclose()
        raise
    return ForwardedResponse(head, messages)
