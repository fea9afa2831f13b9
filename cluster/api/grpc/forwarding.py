"""gRPC calls that another application's Router answers, because the model is its.

The request and its metadata go to a Router of that application, which answers with messages and
then with the status. Admission and limits are that Router's; keys are asked for by both.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from inspect import isasyncgenfunction
from typing import Any

from grpc import StatusCode

from cluster.api.grpc.status import raise_on_serve, reporting_to
from cluster.control.peers import Applications, Fellow
from cluster.replica.limits import check_model

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ForwardedCall:
    """A call of the RPC called `method`; `request` is its protobuf message."""

    method: str
    request: Any
    metadata: Metadata


@dataclass(frozen=True)
class CallStatus:
    """How a call ended; the last thing that is said of it."""

    code: StatusCode | None
    details: str
    trailing_metadata: Metadata

    def apply_to(self, grpc_context: Any) -> None:
        """Ends another call in the same way."""
        if self.code is not None:
            grpc_context.set_code(self.code)
            grpc_context.set_details(self.details)
            grpc_context.set_trailing_metadata(list(self.trailing_metadata))


@dataclass
class ForwardedContext:
    """What a servicer's method sees of a call that came by another Router."""

    metadata: Metadata
    _code: StatusCode | None = None
    _details: str = ""
    _trailing: Metadata = field(default=())

    def invocation_metadata(self) -> Metadata:
        """As the client sent it."""
        return self.metadata

    def set_code(self, code: StatusCode) -> None:
        """As of grpc's context."""
        self._code = code

    def set_details(self, details: str) -> None:
        """As of grpc's context."""
        self._details = details

    def set_trailing_metadata(self, metadata: list[tuple[str, str]]) -> None:
        """As of grpc's context."""
        self._trailing = tuple(metadata)

    @property
    def status(self) -> CallStatus:
        """What has been set."""
        return CallStatus(self._code, self._details, self._trailing)


async def answer(servicer: Any, call: ForwardedCall) -> AsyncGenerator[Any, None]:
    """The messages of a call that came by another Router, and then its CallStatus."""
    context = ForwardedContext(call.metadata)
    method = getattr(servicer, call.method)
    if isasyncgenfunction(method):
        async with aclosing(method(call.request, context)) as messages:
            async for message in messages:
                yield message
    else:
        yield await method(call.request, context)
    yield context.status


Unary = Callable[[Any, Any, Any], Awaitable[Any]]
Stream = Callable[[Any, Any, Any], AsyncGenerator[Any, None]]


@dataclass(frozen=True)
class Guard:
    """What the RPCs of a servicer have in common where a call may be another's.

    check: of a servicer and the context of a call, raises for who may not have others looked for.
    count: of a servicer and the status of a call that failed before its own method was reached.
    """

    check: Callable[[Any, Any], None]
    count: Callable[[Any, StatusCode], None]


def by_model(make_empty: Callable[[], Any], guard: Guard) -> Callable[[Unary], Unary]:
    """Has a unary RPC answered by whoever serves the `model` of its request.

    make_empty: what is returned with an error. The servicer has `applications`.
    """

    def decorate(method: Unary) -> Unary:
        @functools.wraps(method)
        async def call(servicer: Any, request: Any, grpc_context: Any) -> Any:
            with reporting_to(grpc_context, functools.partial(guard.count, servicer)):
                fellow = await _elsewhere(servicer, request.model, grpc_context, guard)
                if fellow is None:
                    return await method(servicer, request, grpc_context)
                asked = _ask(fellow, method.__name__, request, grpc_context)
                async with aclosing(asked) as messages:
                    return [message async for message in messages][-1]
            return make_empty()

        return call

    return decorate


def streamed_by_model(guard: Guard) -> Callable[[Stream], Stream]:
    """The same for an RPC that streams its answer, which ends as Serve wants it."""

    def decorate(method: Stream) -> Stream:
        @functools.wraps(method)
        async def stream(
            servicer: Any, request: Any, grpc_context: Any
        ) -> AsyncGenerator[Any, None]:
            with reporting_to(grpc_context, functools.partial(guard.count, servicer)):
                fellow = await _elsewhere(servicer, request.model, grpc_context, guard)
                if fellow is None:
                    messages = method(servicer, request, grpc_context)
                else:
                    messages = _ask(fellow, method.__name__, request, grpc_context)
                async with aclosing(messages):
                    async for message in messages:
                        yield message
            raise_on_serve(grpc_context)

        return stream

    return decorate


async def _elsewhere(servicer: Any, model: str, grpc_context: Any, guard: Guard) -> Fellow | None:
    """Nobody for what has been forwarded once, or two that err would pass it to and fro.

    Who asks for another model needs a key or token of this application too, before anybody looks
    for it; the call is admitted, and counts, where it is answered.
    """
    applications: Applications | None = servicer.applications
    if applications is None or isinstance(grpc_context, ForwardedContext):
        return None
    if applications.is_own(model):
        return None
    guard.check(servicer, grpc_context)
    return await applications.elsewhere(check_model(model))


async def _ask(
    fellow: Fellow, method: str, request: Any, grpc_context: Any
) -> AsyncGenerator[Any, None]:
    """Its messages; the status goes to `grpc_context`."""
    metadata = tuple(grpc_context.invocation_metadata() or ())
    call = ForwardedCall(method, request, metadata)
    async with aclosing(fellow.stream("answer_call", call)) as messages:
        async for message in messages:
            if isinstance(message, CallStatus):
                message.apply_to(grpc_context)
            else:
                yield message
