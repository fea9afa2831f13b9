"""Relays of a front end to its Router: all but generation and tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.api.base.anthropic_errors import failure_response
from cluster.api.base.openai_errors import failure_of
from cluster.api.front_ends.router_client import RouterClient
from cluster.api.grpc.forwarding import ForwardedCall, pass_on
from cluster.api.http.forwarding import ForwardedRequest, ForwardedResponse
from cluster.api.openai.streams import DisconnectWatch
from protos.specdec.v1 import admin_pb2
from specdec.types.errors import SpecdecError

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


class RelayHttp:
    """ASGI application that relays requests to the Router, whole."""

    def __init__(self, client: RouterClient) -> None:
        self._client = client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        request = Request(scope, receive)
        try:
            forwarded = ForwardedRequest.of(request, await request.body())
            response: ASGIApp = await self._answer(forwarded, scope, receive)
        except ClientDisconnect:
            return
        except SpecdecError as error:
            response = failure_response(failure_of(error), scope["path"])
        await response(scope, receive, send)

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
