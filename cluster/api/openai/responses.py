"""`/v1/responses`: a chat in the newer of OpenAI's two shapes, text only, nothing stored."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from cluster.api.openai import field_names
from cluster.api.openai.chat import ChatPlan, plan_chat
from cluster.api.openai.chat_schema import ChatRequest, ContentPart, Message
from cluster.api.openai.errors import failure_of
from cluster.api.openai.logprobs import TokenLogprob, chat_logprobs
from cluster.api.openai.offload import off_loop, tells_many
from cluster.api.openai.request_builder import Terms
from cluster.api.openai.responses_schema import (
    IncompleteDetails,
    InputMessage,
    InputTokensDetails,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    ResponseBody,
    ResponseError,
    ResponsesRequest,
    ResponseUsage,
)
from cluster.api.openai.schema import ErrorDetails, Usage
from cluster.api.openai.streams import Said, ToldError, answering, event
from cluster.api.openai.structure import JsonSchemaFormat, ResponseFormat
from cluster.api.openai.usage import UsageMeter
from cluster.replica.router import Router
from specdec.types.errors import InvalidValueError
from specdec.types.outputs import RequestOutput
from specdec.types.responses import FinishReason

_COPIED = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stream",
    "top_logprobs",
    "priority",
    "cache_salt",
    "stream_interval",
    "speculation",
)


@dataclass(frozen=True)
class ResponsePlan:
    """A request, and the chat that it comes to."""

    request: ResponsesRequest
    chat: ChatPlan

    @property
    def id(self) -> str:
        """Of the response."""
        return f"resp_{self.chat.terms.request_id}"

    @property
    def message_id(self) -> str:
        """Of its one message."""
        return f"msg_{self.chat.terms.request_id}"


async def plan_response(router: Router, request: ResponsesRequest, terms: Terms) -> ResponsePlan:
    """Decides everything. Raises what is wrong with the request."""
    if request.top_logprobs is not None and not request.include:
        limit = "left out unless include has message.output_text.logprobs"
        raise InvalidValueError("top_logprobs", request.top_logprobs, limit)
    return ResponsePlan(request, await plan_chat(router, as_chat(request), terms))


def as_chat(request: ResponsesRequest) -> ChatRequest:
    """The same request in the older shape."""
    copied = {name: getattr(request, name) for name in _COPIED}
    return ChatRequest(
        messages=list(_messages(request)),
        max_completion_tokens=request.max_output_tokens,
        logprobs=bool(request.include),
        response_format=_response_format(request),
        reasoning_effort=(request.reasoning or {}).get("effort"),
        **copied,
    )


def _messages(request: ResponsesRequest) -> Iterator[Message]:
    if request.instructions is not None:
        yield Message(role="system", content=request.instructions)
    if isinstance(request.input, str):
        yield Message(role="user", content=request.input)
        return
    for each in request.input:
        yield Message(role=each.role, content=_content(each))


def _content(message: InputMessage) -> str | list[ContentPart]:
    if isinstance(message.content, str):
        return message.content
    return [ContentPart(type="text", text=part.text) for part in message.content]


def _response_format(request: ResponsesRequest) -> ResponseFormat | None:
    wanted = request.text.format if request.text else None
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return ResponseFormat(type=wanted.type)
    if wanted.json_schema is None:
        raise InvalidValueError("text.format.schema", None, "given with type json_schema")
    schema = JsonSchemaFormat(name=wanted.name or "schema", schema=wanted.json_schema)
    return ResponseFormat(type="json_schema", json_schema=schema)


async def complete_response(router: Router, plan: ResponsePlan) -> ResponseBody:
    """The whole answer."""
    answer = _Answer(plan)
    said = answering(router, [plan.chat.call], plan.chat.terms.deadline)
    async with aclosing(said):
        async for each in said:
            large = tells_many(each.output, plan.chat.names)
            await off_loop(partial(answer.add, each.output), is_large=large)
    return answer.body()


async def stream_response(
    plan: ResponsePlan, said: AsyncGenerator[Said, None]
) -> AsyncGenerator[bytes, None]:
    """The events of an answer. One that fails ends with `response.failed`, and then ToldError."""
    answer, numbers = _Answer(plan), itertools.count()

    def tell(kind: str, **told: Any) -> bytes:
        data = {"type": kind, "sequence_number": next(numbers), **told}
        return event(json.dumps(data), kind)

    for kind in ("response.created", "response.in_progress"):
        yield tell(kind, response=answer.body().told())
    place = {"item_id": plan.message_id, "output_index": 0}
    yield tell("response.output_item.added", output_index=0, item=answer.message().told())
    part = {**place, "content_index": 0}
    yield tell("response.content_part.added", **part, part=_part("", []).told())
    try:
        async for each in said:
            large = tells_many(each.output, plan.chat.names)
            logprobs = await off_loop(partial(answer.add, each.output), is_large=large)
            if each.output.text or logprobs:
                told = {"delta": each.output.text, "logprobs": _told(logprobs)}
                delta = partial(tell, "response.output_text.delta", **part, **told)
                yield await off_loop(delta, is_large=large)
    except Exception as error:
        answer.error = failure_of(error, names=field_names.RESPONSES).details
        yield tell("response.failed", response=answer.body().told())
        raise ToldError(error) from error

    def closing() -> list[bytes]:
        done = {"text": answer.text, "logprobs": _told(answer.logprobs)}
        return [
            tell("response.output_text.done", **part, **done),
            tell("response.content_part.done", **part, part=answer.part().told()),
            tell("response.output_item.done", output_index=0, item=answer.message().told()),
            tell(f"response.{answer.status}", response=answer.body().told()),
        ]

    for each_event in await off_loop(closing, is_large=plan.chat.names is not None):
        yield each_event


class _Answer:
    """What has been said so far."""

    def __init__(self, plan: ResponsePlan) -> None:
        self._plan = plan
        self._meter = UsageMeter()
        self._ended: FinishReason | None = None
        self.text = ""
        self.logprobs: list[TokenLogprob] = []
        self.error: ErrorDetails | None = None

    def add(self, output: RequestOutput) -> list[TokenLogprob]:
        """Takes in an output; its log-probabilities, where they are asked for."""
        self._meter.add(0, output)
        self.text += output.text
        self._ended = output.finish_reason
        names = self._plan.chat.names
        if output.logprobs is None or names is None:
            return []
        told = chat_logprobs(output.logprobs, names).content
        self.logprobs += told
        return told

    @property
    def status(self) -> Literal["in_progress", "completed", "incomplete", "failed"]:
        if self.error is not None:
            return "failed"
        match self._ended:
            case None:
                return "in_progress"
            case FinishReason.LENGTH:
                return "incomplete"
            case FinishReason.STOP:
                return "completed"

    def part(self) -> OutputText:
        return _part(self.text, self.logprobs)

    def message(self) -> OutputMessage:
        status = self.status
        return OutputMessage(
            type="message",
            id=self._plan.message_id,
            role="assistant",
            status="incomplete" if status == "failed" else status,
            content=[self.part()] if self._meter.has_begun else [],
        )

    def body(self) -> ResponseBody:
        plan, request, status = self._plan, self._plan.request, self.status
        is_cut = status == "incomplete"
        error = self.error
        return ResponseBody(
            id=plan.id,
            object="response",
            created_at=plan.chat.origin.created,
            status=status,
            model=plan.chat.origin.model,
            seed=plan.chat.seed,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            metadata=request.metadata or {},
            output=[self.message()] if self._meter.has_begun else [],
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if is_cut else None,
            error=None if error is None else _error(error),
            usage=_usage(self._meter.usage()) if self._ended else None,
            tools=[],
            tool_choice="none",
            parallel_tool_calls=False,
            store=False,
        )


def _part(text: str, logprobs: list[TokenLogprob]) -> OutputText:
    return OutputText(type="output_text", text=text, annotations=[], logprobs=logprobs)


def _error(error: ErrorDetails) -> ResponseError:
    return ResponseError(code=error.code or error.type, message=error.message)


def _told(logprobs: list[TokenLogprob]) -> list[dict[str, Any]]:
    return [each.told() for each in logprobs]


def _usage(usage: Usage) -> ResponseUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=cached),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(
            reasoning_tokens=0, speculation=usage.completion_tokens_details.speculation
        ),
        total_tokens=usage.total_tokens,
    )
