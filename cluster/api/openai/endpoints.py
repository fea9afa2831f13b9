"""The endpoints that generate text: prepare a request, then return or stream its response."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from fastapi import Request, Response

from cluster.api.openai import field_names
from cluster.api.openai.chat import prepare_chat
from cluster.api.openai.chat_schema import ChatRequest
from cluster.api.openai.completion import prepare_completion
from cluster.api.openai.completion_schema import CompletionRequest
from cluster.api.openai.errors import failure_of
from cluster.api.openai.offload import offload
from cluster.api.openai.request_builder import RequestContext
from cluster.api.openai.request_handler import RequestHandler
from cluster.api.openai.response_builder import ResponseBuilder
from cluster.api.openai.responses import prepare_response
from cluster.api.openai.responses_schema import ResponsesRequest
from cluster.api.openai.streams import (
    EventStream,
    PromptOutput,
    cancel_on_disconnect,
    chained,
    generate_outputs,
)
from cluster.replica.router import Router

Body = TypeVar("Body", ChatRequest, CompletionRequest, ResponsesRequest)


@dataclass(frozen=True)
class Endpoint(Generic[Body]):
    """One path of the API that generates text.

    prepare: validates a request and resolves everything before the first token. names: names of
    fields in this API, by the engine's names.
    """

    prepare: Callable[[Router, Body, RequestContext], Awaitable[ResponseBuilder]]
    names: Mapping[str, str]

    async def answer(
        self, handler: RequestHandler, body: Body, request: Request, context: RequestContext
    ) -> Response:
        """Answer a request; abort it before the next step when the client disconnects.

        Raise the engine's error for an invalid request, also before a stream starts.
        """
        names = {**self.names, **body.sent_names()}
        request.state.field_names = names
        return await cancel_on_disconnect(request, self._answer(handler, body, context, names))

    async def _answer(
        self, handler: RequestHandler, body: Body, context: RequestContext, names: Mapping[str, str]
    ) -> Response:
        router = handler.get_router()
        async with context.deadline.enforce():
            builder = await self.prepare(router, body, context)
        outputs = generate_outputs(router, builder.calls, context.deadline)
        if not body.stream:
            return await _complete(builder, outputs)
        first = await anext(outputs)
        events = _events(handler, builder, chained(first, outputs), names)
        return EventStream(events, outputs, context.deadline)


async def _complete(
    builder: ResponseBuilder, outputs: AsyncGenerator[PromptOutput, None]
) -> Response:
    async with aclosing(outputs):
        async for each in outputs:
            await offload(partial(builder.add, each), is_large=builder.is_large(each.output))
    text = await offload(lambda: builder.body().to_json(), is_large=builder.names is not None)
    return Response(text, media_type="application/json")


async def _events(
    handler: RequestHandler,
    builder: ResponseBuilder,
    outputs: AsyncGenerator[PromptOutput, None],
    names: Mapping[str, str],
) -> AsyncGenerator[bytes, None]:
    async with aclosing(outputs):
        try:
            for data in builder.opening():
                yield data
            async for each in outputs:
                encode = partial(builder.events, each)
                for data in await offload(encode, is_large=builder.is_large(each.output)):
                    yield data
            for data in await offload(builder.closing, is_large=builder.names is not None):
                yield data
        except Exception as error:
            failure = failure_of(error, names=names)
            handler.count(failure)
            for data in builder.failed(failure):
                yield data


CHAT: Endpoint[ChatRequest] = Endpoint(prepare_chat, field_names.CHAT)
COMPLETIONS: Endpoint[CompletionRequest] = Endpoint(prepare_completion, field_names.COMPLETIONS)
RESPONSES: Endpoint[ResponsesRequest] = Endpoint(prepare_response, field_names.RESPONSES)
