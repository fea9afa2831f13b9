"""Headers and caller of the current request, in context variables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

from specdec.types.request import ANONYMOUS

Headers = Iterable[tuple[str | bytes, str | bytes]]


def _none() -> Headers:
    return ()


current_headers: ContextVar[Callable[[], Headers]] = ContextVar("headers", default=_none)
"""Returns the HTTP headers or gRPC metadata of the call that the current task serves.

Set where a call arrives; evaluated only when the headers are needed.
"""

current_caller: ContextVar[str] = ContextVar("caller", default=ANONYMOUS)
"""The name of the API key of that call, by which grammars are compiled in turn."""


class KeepHeaders:
    """ASGI middleware that stores the headers of each HTTP request in `current_headers`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Store the headers and call the application."""
        if scope["type"] == "http":
            current_headers.set(lambda: scope["headers"])
        await self._app(scope, receive, send)


def text_headers(names: Iterable[str]) -> dict[str, str]:
    """Return the current call's headers with these names, which are in lower case."""
    wanted = frozenset(names)
    pairs = ((_text(name).lower(), value) for name, value in current_headers.get()())
    return {name: _text(value) for name, value in pairs if name in wanted}


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
