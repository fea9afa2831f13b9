"""The three ways to have text generated, as one: planned, and then answered at once or streamed."""

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
from cluster.api.openai.offload import off_loop
from cluster.api.openai.request_builder import Terms
from cluster.api.openai.request_handler import Gate
from cluster.api.openai.responses import (
    ResponsePlan,
    complete_response,
    plan_response,
    stream_response,
)
from cluster.api.openai.responses_schema import ResponsesRequest
from cluster.api.openai.schema import AnswerModel
from cluster.api.openai.streams import (
    DONE,
    EventStream,
    Said,
    ToldError,
    answering,
    chained,
    event,
    unless_disconnected,
)
from cluster.replica.router import Router
from specdec.types.request import GenerateRequest

Body = TypeVar("Body", ChatRequest, CompletionRequest, ResponsesRequest)
Plan = TypeVar("Plan", ChatPlan, CompletionPlan, ResponsePlan)


@dataclass(frozen=True)
class Interface(Generic[Body, Plan]):
    """plan: decides all that can be before the first token. calls: what is asked of the Router.

    whole, events: the answer, at once and as it comes. tells_logprobs: whether that may be large.
    names: what it calls fields.
    """

    plan: Callable[[Router, Body, Terms], Awaitable[Plan]]
    calls: Callable[[Plan], Sequence[GenerateRequest]]
    whole: Callable[[Router, Plan], Awaitable[AnswerModel]]
    events: Callable[[Plan, AsyncGenerator[Said, None]], AsyncGenerator[bytes, None]]
    tells_logprobs: Callable[[Plan], bool]
    names: Mapping[str, str]

    async def answer(self, gate: Gate, body: Body, request: Request, terms: Terms) -> Response:
        """The answer; when the client goes, the request is aborted before the next step.

        What the engine has against a request is known before a stream begins, and raised.
        """
        router, names = gate.get_router(), {**self.names, **body.sent_names()}
        request.state.field_names = names
        if body.stream:
            answer = self._stream(gate, router, body, terms, names)
            return await unless_disconnected(request, answer)
        return await unless_disconnected(request, self._whole(router, body, terms))

    async def _whole(self, router: Router, body: Body, terms: Terms) -> Response:
        plan = await self._plan(router, body, terms)
        answer = await self.whole(router, plan)
        text = await off_loop(answer.to_json, is_large=self.tells_logprobs(plan))
        return Response(text, media_type="application/json")

    async def _stream(
        self, gate: Gate, router: Router, body: Body, terms: Terms, names: Mapping[str, str]
    ) -> Response:
        plan = await self._plan(router, body, terms)
        said = answering(router, self.calls(plan), terms.deadline)
        first = await anext(said)
        events = self.events(plan, chained(first, said))
        return EventStream(self._with_errors(gate, events, names), said, terms.deadline)

    async def _plan(self, router: Router, body: Body, terms: Terms) -> Plan:
        async with terms.deadline.held():
            return await self.plan(router, body, terms)

    async def _with_errors(
        self, gate: Gate, events: AsyncGenerator[bytes, None], names: Mapping[str, str]
    ) -> AsyncGenerator[bytes, None]:
        """The status has been sent: an error is an event, as the openai client expects it."""
        async with aclosing(events):
            try:
                async for each in events:
                    yield each
            except ToldError as told:
                gate.count(failure_of(told.error, names=names))
            except Exception as error:
                failure = failure_of(error, names=names)
                gate.count(failure)
                yield event(failure.body.model_dump_json())
                yield DONE


CHAT: Interface[ChatRequest, ChatPlan] = Interface(
    plan_chat,
    lambda plan: [plan.call],
    complete_chat,
    stream_chat,
    lambda plan: plan.names is not None,
    field_names.CHAT,
)
COMPLETIONS: Interface[CompletionRequest, CompletionPlan] = Interface(
    plan_completion,
    lambda plan: plan.calls,
    complete,
    stream_completion,
    lambda plan: plan.names is not None,
    field_names.COMPLETIONS,
)
RESPONSES: Interface[ResponsesRequest, ResponsePlan] = Interface(
    plan_response,
    lambda plan: [plan.chat.call],
    complete_response,
    stream_response,
    lambda plan: plan.chat.names is not None,
    field_names.RESPONSES,
)
