"""HTTP requests that another application's Router answers, because the model is its.

The request goes to a Router of that application as it came, and through the whole of its HTTP
interface: keys and limits are that Router's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.control.peers import Fellow

_MAX_BUFFERED_MESSAGES = 16
"""That wait for a client which reads slowly, before its answer is held up."""

_MARK = "specdec.is_forwarded"

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True)
class ForwardedRequest:
    """A whole request. path: below the prefix of the application that it came to."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes

    @classmethod
    def of(cls, request: Request, body: bytes) -> ForwardedRequest:
        """The same, with the body that has been read already."""
        scope = request.scope
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        headers = tuple((bytes(name), bytes(value)) for name, value in scope["headers"])
        return cls(request.method, path, scope["query_string"], headers, body)

    @property
    def scope(self) -> Scope:
        """As an ASGI application is told."""
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
            "client": None,
            "server": None,
            _MARK: True,
        }


def is_forwarded(request: Request) -> bool:
    """Whether it came by another Router; two that err would pass it to and fro."""
    return _MARK in request.scope


@dataclass(frozen=True)
class ResponseHead:
    """What is said of an answer before its body."""

    status: int
    headers: Headers


async def answer(
    app: ASGIApp, request: ForwardedRequest
) -> AsyncGenerator[ResponseHead | bytes, None]:
    """The head of the answer, and then its body in pieces. Leaving it is the client's going."""
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
            elif message.get("body"):
                yield message["body"]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def _receiver(body: bytes) -> Receive:
    """The body at once, and then nothing any more: whoever goes cancels."""
    parts = [body]

    async def receive() -> Message:
        if not parts:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": parts.pop(), "more_body": False}

    return receive


class ForwardedResponse(StreamingResponse):
    """An answer as another Router gives it; when the client goes it is ended there."""

    def __init__(self, head: ResponseHead, body: AsyncGenerator[bytes, None]) -> None:
        super().__init__(body, head.status)
        self.raw_headers = list(head.headers)
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it piece by piece."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._body.aclose()


async def forward(fellow: Fellow, request: ForwardedRequest) -> ForwardedResponse:
    """What a Router of another application answers. Raises NotReadyError where none can."""
    messages = fellow.stream("answer_request", request)
    try:
        head = await anext(messages)
    except BaseException:
        await messages.aclose()
        raise
    return ForwardedResponse(head, _rest(messages))


async def _rest(messages: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(messages):
        async for each in messages:
            yield each
