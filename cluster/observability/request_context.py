"""What a caller sends beside a request, for whoever needs it further inside: traces do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

Headers = Iterable[tuple[str | bytes, str | bytes]]


def _none() -> Headers:
    return ()


current_headers: ContextVar[Callable[[], Headers]] = ContextVar("headers", default=_none)
"""Reads the headers of HTTP, or the metadata of gRPC, of the call that a task works on.

Set where a call comes in. They are read only when they are asked for.
"""


class KeepHeaders:
    """Makes the headers of each HTTP request known; a middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hands the request on."""
        if scope["type"] == "http":
            current_headers.set(lambda: scope["headers"])
        await self._app(scope, receive, send)


def text_headers(names: Iterable[str]) -> dict[str, str]:
    """Those of the present call that bear one of these names, which are in lower case."""
    wanted = frozenset(names)
    pairs = ((_text(name).lower(), value) for name, value in current_headers.get()())
    return {name: _text(value) for name, value in pairs if name in wanted}


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
