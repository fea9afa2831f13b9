"""Chat, completions and responses as one: plan a request, then return or stream its answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, TypeVar

from fastapi import Request, Response

from cluster.api.openai import field_names
from cluster.api.openai.chat import ChatPlan, complete_chat, plan_chat, stream_chat
from cluster.api.openai.chat_schema import ChatRequest
from cluster.api.openai.completion import (
    CompletionPlan,
    complete,
    plan_completion,
    stream_completion,
)
from cluster.api.openai.completion_schema import CompletionRequest
from cluster.api.openai.errors import failure_of
from cluster.api.openai.offload import offload
from cluster.api.openai.request_builder import RequestContext
from cluster.api.openai.request_handler import RequestHandler
from cluster.api.openai.responses import (
    ResponsePlan,
    complete_response,
    plan_response,
    stream_response,
)
from cluster.api.openai.responses_schema import ResponsesRequest
from cluster.api.openai.schema import ResponseModel
from cluster.api.openai.streams import (
    DONE,
    EventStream,
    PromptOutput,
    ReportedError,
    cancel_on_disconnect,
    chained,
    generate_outputs,
)
from cluster.api.sse import event
from cluster.replica.requests import GenerateCall
from cluster.replica.router import Router

Body = TypeVar("Body", ChatRequest, CompletionRequest, ResponsesRequest)
Plan = TypeVar("Plan", ChatPlan, CompletionPlan, ResponsePlan)


@dataclass(frozen=True)
class Endpoint(Generic[Body, Plan]):
    """One path of the API that generates text.

    plan: resolves a request before the first token. calls: the requests for the Router.
    whole, events: build the complete answer, or its stream. has_logprobs: whether the answer may
    be large. names: names of fields in this API, by the engine's names.
    """

    plan: Callable[[Router, Body, RequestContext], Awaitable[Plan]]
    calls: Callable[[Plan], Sequence[GenerateCall]]
    whole: Callable[[Router, Plan], Awaitable[ResponseModel]]
    events: Callable[[Plan, AsyncGenerator[PromptOutput, None]], AsyncGenerator[bytes, None]]
    has_logprobs: Callable[[Plan], bool]
    names: Mapping[str, str]

    async def answer(
        self, handler: RequestHandler, body: Body, request: Request, context: RequestContext
    ) -> Response:
        """Answer a request; abort it before the next step when the client disconnects.

        Raise the engine's error for an invalid request, also before a stream starts.
        """
        router, names = handler.get_router(), {**self.names, **body.sent_names()}
        request.state.field_names = names
        if body.stream:
            answer = self._stream(handler, router, body, context, names)
            return await cancel_on_disconnect(request, answer)
        return await cancel_on_disconnect(request, self._whole(router, body, context))

    async def _whole(self, router: Router, body: Body, context: RequestContext) -> Response:
        plan = await self._plan(router, body, context)
        answer = await self.whole(router, plan)
        text = await offload(answer.to_json, is_large=self.has_logprobs(plan))
        return Response(text, media_type="application/json")

    async def _stream(
        self,
        handler: RequestHandler,
        router: Router,
        body: Body,
        context: RequestContext,
        names: Mapping[str, str],
    ) -> Response:
        plan = await self._plan(router, body, context)
        outputs = generate_outputs(router, self.calls(plan), context.deadline)
        first = await anext(outputs)
        events = self.events(plan, chained(first, outputs))
        return EventStream(self._with_errors(handler, events, names), outputs, context.deadline)

    async def _plan(self, router: Router, body: Body, context: RequestContext) -> Plan:
        async with context.deadline.enforce():
            return await self.plan(router, body, context)

    async def _with_errors(
        self, handler: RequestHandler, events: AsyncGenerator[bytes, None], names: Mapping[str, str]
    ) -> AsyncGenerator[bytes, None]:
        """Send an error as an event, as the openai client expects: the status has been sent."""
        async with aclosing(events):
            try:
                async for each in events:
                    yield each
            except ReportedError as reported:
                handler.count(failure_of(reported.error, names=names))
            except Exception as error:
                failure = failure_of(error, names=names)
                handler.count(failure)
                yield event(failure.body.model_dump_json())
                yield DONE


CHAT: Endpoint[ChatRequest, ChatPlan] = Endpoint(
    plan_chat,
    lambda plan: [plan.call],
    complete_chat,
    stream_chat,
    lambda plan: plan.names is not None,
    field_names.CHAT,
)
COMPLETIONS: Endpoint[CompletionRequest, CompletionPlan] = Endpoint(
    plan_completion,
    lambda plan: plan.calls,
    complete,
    stream_completion,
    lambda plan: plan.names is not None,
    field_names.COMPLETIONS,
)
RESPONSES: Endpoint[ResponsesRequest, ResponsePlan] = Endpoint(
    plan_response,
    lambda plan: [plan.chat.call],
    complete_response,
    stream_response,
    lambda plan: plan.chat.names is not None,
    field_names.RESPONSES,
)
