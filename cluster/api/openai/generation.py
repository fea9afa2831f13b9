"""Generation of a response: from a request's body to its outputs, whole or as a stream.

A stream begins while its prompt is queued or computed: the status and the headers are sent when the
engine has admitted the request, with an empty line, which clients skip even if they parse lines
instead of events.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar

from fastapi import Response

from cluster.api.base.json_body import ApiRequest
from cluster.api.base.openai_errors import failure_of
from cluster.api.base.sse import EMPTY_LINE
from cluster.api.openai.builders import RequestContext, ResponseBuilder, offload
from cluster.api.openai.forced_calls import until_repeated
from cluster.api.openai.request_handler import RequestHandler, authorization_of
from cluster.api.openai.request_warnings import warning_headers
from cluster.api.openai.streams import (
    DisconnectWatch,
    EventStream,
    PromptOutput,
    generate_outputs,
)
from cluster.replica.router import Router
from specdec.types.deadline import Deadline

Outputs = AsyncGenerator[PromptOutput, None]


class GenerationRequest(Protocol):
    """Interface of the requests of all APIs that generate. Fields are as in `RequestModel`."""

    api_names: ClassVar[Mapping[str, str]]

    @property
    def priority(self) -> int:
        """Scheduling priority."""

    @property
    def stream(self) -> bool:
        """Return whether the response is a stream."""

    def sent_names(self) -> dict[str, str]:
        """Return the names that the client used for fields with several spellings."""


Body = TypeVar("Body", bound=GenerationRequest)


class PendingOutputs:
    """Outputs whose first one is awaited in a task. Iterate once; close it in any case."""

    def __init__(self, generate: Callable[[Callable[[], None]], Outputs]) -> None:
        """Start the requests.

        generate: returns their outputs, and calls its argument when the engine has admitted them.
        """
        self._is_admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outputs = generate(self._admit)
        self._first = asyncio.create_task(_first_of(self._outputs))
        self._first.add_done_callback(self._admit)

    def _admit(self, *_: object) -> None:
        if not self._is_admitted.done():
            self._is_admitted.set_result(None)

    @property
    def has_first(self) -> bool:
        """Return whether the first output, or the error before it, is there."""
        return self._first.done()

    async def wait_until_admitted(self) -> None:
        """Wait. Raise the error of requests that were not admitted, after closing them."""
        await self._wait(self._is_admitted)

    async def wait_for_first(self) -> None:
        """Wait for the first output. Raise the error before it, after closing the requests."""
        await self._wait(self._first)

    async def _wait(self, future: asyncio.Future[Any]) -> None:
        try:
            await future
            if self._first.done():
                self._first.result()
        except BaseException:
            await self.aclose()
            raise

    async def __aiter__(self) -> AsyncIterator[PromptOutput]:
        """Yield all outputs."""
        yield await self._first
        async for each in self._outputs:
            yield each

    async def aclose(self) -> None:
        """End the requests."""
        self._first.cancel()
        if not self._first.done() or self._first.cancelled() or self._first.exception():
            await asyncio.gather(self._first, return_exceptions=True)
        await self._outputs.aclose()


async def _first_of(outputs: Outputs) -> PromptOutput:
    return await anext(outputs)


async def generate_response(
    handler: RequestHandler,
    prepare: Callable[[Router, Body, RequestContext], Awaitable[ResponseBuilder]],
    body: Body,
    request: ApiRequest,
    request_id: str | None = None,
) -> Response:
    """Answer a request; abort it before the next step when the client disconnects.

    prepare: validates the request and resolves everything before the first token. Raise the
    engine's error for an invalid request, also before a stream starts.
    """
    context = handler.context(request, request_id)
    get_names = request.get_names = partial(_names, body)
    router, watch = handler.get_router(), DisconnectWatch(request.receive)

    async def answer() -> Response:
        handler.get_keys().check_priority(authorization_of(request), body.priority)
        with context.deadline.enforce():
            builder = await prepare(router, body, context)
        if not body.stream:
            return await _complete(builder, _outputs(router, builder, context.deadline))
        return await _stream(handler, builder, context.deadline, get_names)

    response: Response | None = None
    try:
        with watch:
            response = await answer()
        if headers := warning_headers(context.warnings, get_names):
            response.headers.update(headers)
    except BaseException:
        watch.close()
        if isinstance(response, EventStream):
            await response.aclose()
        raise
    if isinstance(response, EventStream):
        response.watch = watch
    else:
        watch.close()
    return response


def _names(body: GenerationRequest) -> Mapping[str, str]:
    """Return the client's names of fields, by the engine's."""
    return {**body.api_names, **body.sent_names()}


async def _stream(
    handler: RequestHandler,
    builder: ResponseBuilder,
    deadline: Deadline,
    get_names: Callable[[], Mapping[str, str]],
) -> EventStream:
    """Return the response once the engine has admitted the requests, or raise their error."""
    interval_s = handler.get_router().config.sse_keep_alive_s
    outputs = PendingOutputs(partial(_outputs, handler.get_router(), builder, deadline))
    await (outputs.wait_until_admitted() if interval_s else outputs.wait_for_first())
    events = _events(handler, builder, outputs, get_names)
    return EventStream(
        events, outputs, deadline, keep_alive_s=interval_s, comment=builder.keep_alive
    )


def _outputs(
    router: Router,
    builder: ResponseBuilder,
    deadline: Deadline,
    on_admitted: Callable[[], None] = lambda: None,
) -> AsyncGenerator[PromptOutput, None]:
    """Return the outputs of a builder's requests; forced calls end at a repeated one."""
    calls, budget = builder.calls, builder.thinking_budget
    outputs = generate_outputs(router, calls, deadline, budget, on_admitted)
    if builder.forced_calls is None:
        return outputs
    return until_repeated(outputs, builder.forced_calls, calls[0].params.n)


async def _complete(
    builder: ResponseBuilder, outputs: AsyncGenerator[PromptOutput, None]
) -> Response:
    async with aclosing(outputs):
        async for each in outputs:
            await offload(partial(builder.add, each), is_large=builder.is_large(each.output))
    text = await offload(lambda: builder.body().to_json(), is_large=builder.is_body_large)
    return Response(text, media_type="application/json")


async def _events(
    handler: RequestHandler,
    builder: ResponseBuilder,
    outputs: PendingOutputs,
    get_names: Callable[[], Mapping[str, str]],
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream."""
    async with aclosing(outputs):
        try:
            for data in builder.opening():
                yield data
            if not outputs.has_first:
                yield EMPTY_LINE
            async for each in outputs:
                if builder.is_large(each.output):
                    encoded = await asyncio.to_thread(builder.events, each)
                else:
                    encoded = builder.events(each)
                if encoded:
                    yield b"".join(encoded)
            for data in await offload(builder.closing, is_large=builder.names is not None):
                yield data
        except Exception as error:
            failure = failure_of(error, names=get_names())
            handler.count(failure)
            for data in builder.failed(failure):
                yield data
