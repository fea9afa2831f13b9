"""Middleware of Serve's HTTP proxies that gives each request for generation a routing hint."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.api.base.routing_hint import RoutingHint, claims_hint
from cluster.workers.ray.ray_internals import session_header

_GENERATION_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/generate",
)


class AddRoutingHint:
    """ASGI middleware that replaces the session header of a request by its `RoutingHint`.

    The client's own session id becomes a part of the hint; one that claims to be a hint is removed.
    Whole bodies must arrive as one message (`ReadBodies`).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._header = session_header().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        scope = self._without_claims(scope)
        if scope.get("method") != "POST" or not scope["path"].endswith(_GENERATION_PATHS):
            await self._app(scope, receive, send)
            return
        first: list[Message] = [await receive()]

        async def receive_again() -> Message:
            return first.pop() if first else await receive()

        await self._app(self._with_hint(scope, first[0]), receive_again, send)

    def _without_claims(self, scope: Scope) -> Scope:
        """Return the scope of a request without session ids that claim to be hints."""
        headers = scope.get("headers", ())
        kept = [
            (name, value)
            for name, value in headers
            if not (self._is_session(name) and claims_hint(value.decode("latin-1")))
        ]
        return scope if len(kept) == len(headers) else {**scope, "headers": kept}

    def _with_hint(self, scope: Scope, message: Message) -> Scope:
        headers = [(name, value) for name, value in scope["headers"] if not self._is_session(name)]
        session = b"".join(value for name, value in scope["headers"] if self._is_session(name))
        hint = RoutingHint.of_body(message.get("body", b""), session.decode("latin-1"))
        if hint is None:
            return scope
        return {**scope, "headers": [*headers, (self._header, hint.encode().encode())]}

    def _is_session(self, name: bytes) -> bool:
        """Serve takes dashes and underscores for the same, too."""
        return name.lower().replace(b"_", b"-") == self._header.lower().replace(b"_", b"-")
