"""Generation of a response: its routes, and the way from a body to outputs, whole or as a stream.

A stream begins while its prompt is queued or computed: the status and the headers are sent when the
engine has admitted the request, with an empty line, which clients skip even if they parse lines
instead of events.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import APIRouter, Response

from cluster.api.base.openai_errors import failure_of
from cluster.api.base.sse import EMPTY_LINE
from cluster.api.http.bodies import ApiRequest
from cluster.api.openai.builders import RequestContext, ResponseBuilder, offload
from cluster.api.openai.chat import prepare_chat
from cluster.api.openai.completion import prepare_completion
from cluster.api.openai.forced_calls import until_repeated
from cluster.api.openai.request_handler import RequestHandler, answers, authorization_of
from cluster.api.openai.request_warnings import warning_headers
from cluster.api.openai.responses.builder import prepare_response
from cluster.api.openai.schemas.chat_schema import ChatCompletion, ChatRequest
from cluster.api.openai.schemas.completion_schema import Completion, CompletionRequest
from cluster.api.openai.schemas.responses_schema import ResponseBody, ResponsesRequest
from cluster.api.openai.streams import (
    DisconnectWatch,
    EventStream,
    LastEvents,
    Outputs,
    PendingOutputs,
    PromptOutput,
)
from cluster.replica.arrival import Arrival
from cluster.replica.limits import check_model
from cluster.replica.router import Router
from specdec.engine.metrics.metrics import CHAT, TEXT_COMPLETION
from specdec.types.deadline import Deadline
from specdec.types.request import GenerateRequest


class GenerationRequest(Protocol):
    """Interface of the requests of all APIs that generate. Fields are as in `RequestModel`."""

    @property
    def model(self) -> str | None:
        """Name of the model, if there is one."""

    @property
    def priority(self) -> int:
        """Scheduling priority."""

    @property
    def stream(self) -> bool:
        """Return whether the response is a stream."""

    def names(self) -> dict[str, str]:
        """Return the client's names of fields, by the engine's."""


Body = TypeVar("Body", bound=GenerationRequest)


def add_generation(routes: APIRouter, handler: RequestHandler) -> None:
    """Add the routes that generate."""

    @routes.post("/v1/chat/completions", responses=answers(ChatCompletion, "chunks"))
    async def chat_completions(body: ChatRequest, request: ApiRequest) -> Response:
        """Generate the next message of a chat, streamed with `stream`."""
        return await generate_response(
            handler, prepare_chat, body, request, body.request_id, num_choices=body.n or 1
        )

    @routes.post("/v1/completions", responses=answers(Completion, "completions"))
    async def completions(body: CompletionRequest, request: ApiRequest) -> Response:
        """Complete a text, streamed with `stream`."""
        return await generate_response(
            handler,
            prepare_completion,
            body,
            request,
            body.request_id,
            operation=TEXT_COMPLETION,
            num_choices=len(body.prompts) * (body.n or 1),
        )

    @routes.post("/v1/responses", responses=answers(ResponseBody, "response events"))
    async def responses(body: ResponsesRequest, request: ApiRequest) -> Response:
        """Generate a response, without stored state."""
        return await generate_response(handler, prepare_response, body, request, body.request_id)


async def generate_response(
    handler: RequestHandler,
    prepare: Callable[[Router, Body, RequestContext], Awaitable[ResponseBuilder]],
    body: Body,
    request: ApiRequest,
    request_id: str | list[str] | None = None,
    *,
    operation: str = CHAT,
    num_choices: int = 1,
) -> Response:
    """Answer a request; abort it before the next step when the client disconnects.

    prepare: validates the request and resolves everything before the first token. request_id: in
    the body, or those of its prompts. num_choices: of all prompts. Raise the engine's error for an
    invalid request, also before a stream starts.
    """
    context = handler.context(request, request_id if isinstance(request_id, str) else None)
    request_ids = context.request_id, *(request_id if isinstance(request_id, list) else ())
    router, watch = handler.get_router(), DisconnectWatch(request.scope, request.receive)
    response: Response | None = None
    try:
        with watch:
            handler.get_keys().check_priority(authorization_of(request), body.priority)
            router.require_model(model := check_model(body.model or ""))
            arrival = router.arrive(request_ids, model, operation, num_choices)
            response = await _respond(handler, prepare, body, context, arrival)
        if headers := warning_headers(context.warnings, body.names):
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


async def _respond(
    handler: RequestHandler,
    prepare: Callable[[Router, Body, RequestContext], Awaitable[ResponseBuilder]],
    body: Body,
    context: RequestContext,
    arrival: Arrival,
) -> Response:
    """Prepare a request that has arrived, and return its response."""
    router, deadline = handler.get_router(), context.deadline
    with arrival, deadline.enforce():
        builder = await prepare(router, body, context)
    generate = partial(_outputs, router, builder, arrival, deadline)
    if body.stream:
        return await _stream(handler, builder, generate, deadline, body.names)
    return await _complete(builder, generate())


async def _stream(
    handler: RequestHandler,
    builder: ResponseBuilder,
    generate: Callable[[Callable[[], None]], Outputs],
    deadline: Deadline,
    get_names: Callable[[], Mapping[str, str]],
) -> EventStream:
    """Return the response once the engine has admitted the requests, or raise their error."""
    interval_s = handler.get_router().config.sse_keep_alive_s
    outputs = PendingOutputs(generate)
    await (outputs.wait_until_admitted() if interval_s else outputs.wait_for_first())
    events = _events(handler, builder, outputs, get_names)
    return EventStream(
        events, outputs, deadline, keep_alive_s=interval_s, comment=builder.keep_alive
    )


def _outputs(
    router: Router,
    builder: ResponseBuilder,
    arrival: Arrival,
    deadline: Deadline,
    on_admitted: Callable[[], None] | None = None,
) -> Outputs:
    """Return the outputs of a builder's requests; forced calls end at a repeated one."""
    calls = builder.calls
    outputs = generate_outputs(router, calls, arrival, deadline, on_admitted)
    if builder.forced_calls is None:
        return outputs
    reading, num_choices = builder.forced_calls, calls[0].params.n
    return until_repeated(outputs, reading, num_choices, arrival.on_choice_end)


def generate_outputs(
    router: Router,
    calls: Sequence[GenerateRequest],
    arrival: Arrival,
    deadline: Deadline,
    on_admitted: Callable[[], None] | None = None,
) -> Outputs:
    """Return the outputs of all calls as they arrive. Closing the generator aborts the requests.

    on_admitted: called once the engine has accepted all calls.

    Its outputs raise the errors of the router and the engine, and `deadline.error`.
    """
    if len(calls) == 1:
        return _one(router, 0, calls[0], arrival, deadline, on_admitted)
    parts = [  # now, so that no abort is missed
        (each, arrival.part(each, is_first=index == 0)) for index, each in enumerate(calls)
    ]
    return _all(router, parts, deadline, on_admitted)


async def _one(
    router: Router,
    index: int,
    call: GenerateRequest,
    arrival: Arrival,
    deadline: Deadline,
    on_admitted: Callable[[], None] | None,
) -> Outputs:
    started = await router.generate(
        call, arrival=arrival, deadline=deadline, on_admitted=on_admitted
    )
    try:
        async for output in started.outputs:
            yield PromptOutput(index, output)
    finally:
        await started.outputs.aclose()  # as `aclosing` does, without its two coroutines


async def _all(
    router: Router,
    calls: Sequence[tuple[GenerateRequest, Arrival]],
    deadline: Deadline,
    on_admitted: Callable[[], None] | None,
) -> Outputs:
    """Run the calls concurrently; the first error aborts all of them."""
    queue = asyncio.Queue[PromptOutput | Exception | None](len(calls))  # others wait, joined
    num_admitted = 0

    def count_admitted() -> None:
        nonlocal num_admitted
        num_admitted += 1
        if on_admitted and num_admitted == len(calls):
            on_admitted()

    async def run(index: int, call: GenerateRequest, arrival: Arrival) -> None:
        try:
            outputs = _one(router, index, call, arrival, deadline, on_admitted and count_admitted)
            async with aclosing(outputs):
                async for each in outputs:
                    await queue.put(each)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(run(index, *each)) for index, each in enumerate(calls)]
    num_running = len(tasks)
    try:
        while num_running:
            each = await queue.get()
            if isinstance(each, Exception):
                raise each
            if each is None:
                num_running -= 1
            else:
                yield each
    finally:
        await _cancel(*tasks)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _complete(builder: ResponseBuilder, outputs: Outputs) -> Response:
    try:
        async for each in outputs:
            if builder.is_large(each.output):
                await asyncio.to_thread(builder.add, each)
            else:
                builder.add(each)
    finally:
        await outputs.aclose()
    text = await offload(builder.to_json, is_large=builder.is_body_large)
    return Response(text, media_type="application/json")


async def _events(
    handler: RequestHandler,
    builder: ResponseBuilder,
    outputs: PendingOutputs,
    get_names: Callable[[], Mapping[str, str]],
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream; those of the last output together with the end."""
    is_alone, unsent = len(builder.calls) == 1, list[bytes]()
    async with aclosing(outputs):
        try:
            for data in builder.opening():
                yield data
            if not outputs.has_first:
                yield EMPTY_LINE
            async for each in outputs:
                if builder.is_large(each.output):
                    unsent += await asyncio.to_thread(builder.events, each)
                else:
                    unsent += builder.events(each)
                if unsent and not (is_alone and each.output.is_last):
                    yield b"".join(unsent)
                    unsent.clear()
            unsent += await offload(builder.closing, is_large=builder.names is not None)
        except Exception as error:
            failure = failure_of(error, names=get_names())
            handler.count(failure)
            unsent += builder.failed(failure)
        yield LastEvents(b"".join(unsent))
