"""Relays of a front end to its Router: all but generation and tokens."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.api.base.anthropic_errors import failure_response
from cluster.api.base.authentication import AdminAccess, ApiKeys
from cluster.api.base.openai_errors import failure_of
from cluster.api.front_ends.router_client import RouterClient
from cluster.api.grpc.forwarding import ForwardedCall, pass_on
from cluster.api.http.admin import MAX_BODY_BYTES
from cluster.api.http.connection import CONNECTION_LOST
from cluster.api.http.forwarding import ForwardedRequest, ForwardedResponse
from cluster.api.openai.request_handler import authorization_of
from cluster.api.openai.streams import DisconnectWatch
from protos.specdec.v1 import admin_pb2
from specdec.types.errors import SpecdecError, UnauthenticatedError

HTTP, GRPC = "http", "grpc"
"""Methods of the Router: its HTTP interface, and its AdminService."""

_OWN_PATHS = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses/input_tokens",
        "/generate",
        "/tokenize",
        "/detokenize",
    }
)


class RelayOthers:
    """ASGI application that answers the paths of generation, and relays all others."""

    def __init__(self, own: ASGIApp, relay: ASGIApp) -> None:
        self._own, self._relay = own, relay

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        is_own = scope["type"] != "http" or scope["path"] in _OWN_PATHS
        await (self._own if is_own else self._relay)(scope, receive, send)


_TRY_IT = "/dashboard/generate"
"""The only relayed path with prompts; the bodies of others have MAX_BODY_BYTES at most."""
_OF_OPERATORS = ("/v1/admin/", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", _TRY_IT)


class RelayHttp:
    """ASGI application that relays requests to the Router, with what it reads of their bodies.

    The Router refuses requests without a credential before their bodies, and longer bodies.
    """

    def __init__(self, client: RouterClient, access: AdminAccess, keys: ApiKeys) -> None:
        self._client, self._access, self._keys = client, access, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        request, on_disconnect = Request(scope, receive), _disconnect_of(scope, receive)
        try:
            body = await _body(request, self._max_bytes(request))
            forwarded = ForwardedRequest.of(request, body)
            response: ASGIApp = await self._answer(forwarded, scope, receive)
        except ClientDisconnect:
            return
        except SpecdecError as error:
            response = failure_response(failure_of(error), scope["path"])
        await response(scope, on_disconnect, send)

    def _max_bytes(self, request: Request) -> float:
        """Return the size from which on the Router reads no more of the body."""
        path = request.scope["path"]
        checks, credential = [self._access.check], request.headers.get("authorization")
        if not path.startswith(_OF_OPERATORS):
            checks, credential = [*checks, self._keys.check], authorization_of(request)
        if not any(_passes(check, credential) for check in checks):
            return 0
        return math.inf if path == _TRY_IT else MAX_BODY_BYTES + 1

    async def _answer(
        self, request: ForwardedRequest, scope: Scope, receive: Receive
    ) -> ForwardedResponse:
        """Wait for the head of the response; the call ends if the client leaves."""
        messages, watch = self._client.call(HTTP, request), DisconnectWatch(scope, receive)
        try:
            with watch:
                head = await anext(messages)
        except BaseException:
            await messages.aclose()
            raise
        finally:
            watch.close()
        return ForwardedResponse(head, messages)


def _passes(check: Callable[[str | None], None], credential: str | None) -> bool:
    try:
        check(credential)
    except UnauthenticatedError:
        return False
    return True


async def _body(request: Request, max_bytes: float) -> bytes:
    """Return the body, or at least `max_bytes` of it."""
    body = bytearray()
    if max_bytes:
        async for part in request.stream():
            body += part
            if len(body) >= max_bytes:
                break
    return bytes(body)


def _disconnect_of(scope: Scope, receive: Receive) -> Receive:
    """Return what receives the disconnect of the client, and reads no more of its body."""
    lost: asyncio.Future[None] | None = scope.get("state", {}).get(CONNECTION_LOST)
    if lost is None:
        return receive

    async def receive_disconnect() -> Message:
        await asyncio.shield(lost)
        return {"type": "http.disconnect"}

    return receive_disconnect


class RelayedAdminServicer:
    """AdminService of the Router; the credential is checked there."""

    def __init__(self, client: RouterClient) -> None:
        self._client = client
        for service in admin_pb2.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                relay = self._stream if method.server_streaming else self._unary
                setattr(self, method.name, relay(method.name))

    def _unary(self, name: str) -> Any:
        async def call(request: Any, grpc_context: Any) -> Any:
            async with aclosing(self._ask(name, request, grpc_context)) as messages:
                return [message async for message in messages][-1]

        return call

    def _stream(self, name: str) -> Any:
        async def stream(request: Any, grpc_context: Any) -> AsyncGenerator[Any, None]:
            async with aclosing(self._ask(name, request, grpc_context)) as messages:
                async for message in messages:
                    yield message

        return stream

    def _ask(self, name: str, request: Any, grpc_context: Any) -> AsyncGenerator[Any, None]:
        answer = self._client.call(GRPC, ForwardedCall.of(name, request, grpc_context))
        return pass_on(answer, grpc_context)
