"""Forwarding of gRPC calls to the application that serves their model.

The request and its metadata go to a Router of that application, which returns the messages and then
the status. That Router does admission and limits; both check the key.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from inspect import isasyncgenfunction
from typing import Any

from grpc import StatusCode

from cluster.api.base.byte_budget import ByteBudget
from cluster.api.grpc.routing import SESSION_METADATA
from cluster.api.grpc.status import empty_response, raise_on_serve, reporting_to
from cluster.control.peers import Applications, PeerApplication
from cluster.replica.limits import check_model

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ForwardedCall:
    """A call of the RPC `method`; `request` is its protobuf message.

    peer: the client, as grpc names it.
    """

    method: str
    request: Any = field(repr=False)
    metadata: Metadata = field(repr=False)  # with the credential of the client
    peer: str

    @classmethod
    def of(cls, method: str, request: Any, grpc_context: Any) -> ForwardedCall:
        """Return a call that has come here."""
        pairs = grpc_context.invocation_metadata() or ()  # of a type that cannot be pickled
        metadata = tuple((name, value) for name, value in pairs)
        return cls(method, request, metadata, grpc_context.peer())


@dataclass
class _Context:
    """Context of a call that another Router or a front end has sent here; the methods are grpc's.

    It is returned after the last message, for the status of the call.
    """

    metadata: Metadata = field(default=(), repr=False)
    client: str = ""
    code: StatusCode | None = None
    details: str = ""
    trailing_metadata: Metadata = ()

    def invocation_metadata(self) -> Metadata:
        return self.metadata

    def peer(self) -> str:
        return self.client

    def set_code(self, code: StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, metadata: list[tuple[str, str]]) -> None:
        self.trailing_metadata = tuple(metadata)


async def answer(servicer: Any, call: ForwardedCall) -> AsyncGenerator[Any, None]:
    """Yield the messages of a call that another Router has forwarded, and then its context."""
    context = _Context(call.metadata, call.peer)
    method = getattr(servicer, call.method)
    if isasyncgenfunction(method):
        async with aclosing(method(call.request, context)) as messages:
            async for message in messages:
                yield message
    else:
        yield await method(call.request, context)
    yield replace(context, metadata=())


async def pass_on(
    answer: AsyncGenerator[Any, None], grpc_context: Any
) -> AsyncGenerator[Any, None]:
    """Yield the messages of `answer`; its status goes to the context of the call here."""
    async with aclosing(answer) as messages:
        async for message in messages:
            if not isinstance(message, _Context):
                yield message
            elif message.code is not None:
                grpc_context.set_code(message.code)
                grpc_context.set_details(message.details)
                grpc_context.set_trailing_metadata(list(message.trailing_metadata))


@dataclass(frozen=True)
class Forwarding:
    """Forwards the calls of a servicer whose `model` is served by another application.

    check: raises for a caller who may not have other applications looked up. count: counts the
    status of a call that failed before it reached a servicer. budget: for the requests that are
    forwarded; a servicer counts its own.
    """

    applications: Applications
    check: Callable[[Any], object]  # of the context of a call
    count: Callable[[StatusCode], None]
    budget: ByteBudget

    def mount(self, servicer: Any, methods: Iterable[str]) -> None:
        """Wrap these RPCs of a servicer."""
        for name in methods:
            method = getattr(servicer, name)
            wrap = self._stream if isasyncgenfunction(method) else self._unary
            setattr(servicer, name, wrap(method))

    def _unary(self, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(method)
        async def call(request: Any, grpc_context: Any) -> Any:
            with reporting_to(grpc_context, self.count):
                peer = await self._find_peer(request.model, grpc_context)
                if peer is None:
                    return await method(request, grpc_context)
                asked = self._ask(peer, method.__name__, request, grpc_context)
                async with aclosing(asked) as messages:
                    return [message async for message in messages][-1]
            return empty_response(method)

        return call

    def _stream(
        self, method: Callable[..., AsyncGenerator[Any, None]]
    ) -> Callable[..., AsyncGenerator[Any, None]]:
        @functools.wraps(method)
        async def stream(request: Any, grpc_context: Any) -> AsyncGenerator[Any, None]:
            with reporting_to(grpc_context, self.count):
                peer = await self._find_peer(request.model, grpc_context)
                if peer is None:
                    messages = method(request, grpc_context)
                else:
                    messages = self._ask(peer, method.__name__, request, grpc_context)
                async with aclosing(messages):
                    async for message in messages:
                        yield message
            raise_on_serve(grpc_context)

        return stream

    async def _find_peer(self, model: str, grpc_context: Any) -> PeerApplication | None:
        """Return the application to forward to; None for this one.

        The caller needs a key or token of this application too, before any other is looked up; the
        call is admitted, and counts, where it is answered. A call that was forwarded here must be
        for this one: it is not forwarded in a loop.
        """
        if self.applications.is_own(model):
            return None
        self.check(grpc_context)
        check_model(model)
        if isinstance(grpc_context, _Context):
            self.applications.require_own(model)
            return None
        return await self.applications.find(model)

    async def _ask(
        self, peer: PeerApplication, method: str, request: Any, grpc_context: Any
    ) -> AsyncGenerator[Any, None]:
        """Yield the messages of another application; its status goes to `grpc_context`."""
        call = ForwardedCall.of(method, request, grpc_context)
        session_id = dict(call.metadata).get(SESSION_METADATA, "")
        with self.budget.hold(request.ByteSize()):
            stream = peer.stream("answer_call", call, session_id=session_id)
            async with aclosing(pass_on(stream, grpc_context)) as messages:
                async for message in messages:
                    yield message
