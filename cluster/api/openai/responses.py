"""`/v1/responses`: a chat in OpenAI's newer format, text only, without stored state."""

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
from cluster.api.openai.offload import has_many_logprobs, offload
from cluster.api.openai.request_builder import RequestContext
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
from cluster.api.openai.streams import PromptOutput, ReportedError, generate_outputs
from cluster.api.openai.structure import JsonSchemaFormat, ResponseFormat
from cluster.api.openai.usage import UsageMeter
from cluster.api.sse import event
from cluster.replica.router import Router
from specdec.engine.outputs import RequestOutput
from specdec.types.errors import InvalidValueError
from specdec.types.messages import FinishReason

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
    """A request with its equivalent chat."""

    request: ResponsesRequest
    chat: ChatPlan

    @property
    def id(self) -> str:
        """Id of the response."""
        return f"resp_{self.chat.context.request_id}"

    @property
    def message_id(self) -> str:
        """Id of its only message."""
        return f"msg_{self.chat.context.request_id}"


async def plan_response(
    router: Router, request: ResponsesRequest, context: RequestContext
) -> ResponsePlan:
    """Validate and tokenize a request. Raise the errors of its fields."""
    if request.top_logprobs is not None and not request.include:
        limit = "left out unless include contains message.output_text.logprobs"
        raise InvalidValueError("top_logprobs", request.top_logprobs, limit)
    return ResponsePlan(request, await plan_chat(router, as_chat(request), context))


def as_chat(request: ResponsesRequest) -> ChatRequest:
    """Convert a request to the equivalent chat."""
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
    form = request.text.format if request.text else None
    if form is None:
        return None
    if form.type != "json_schema":
        return ResponseFormat(type=form.type)
    if form.json_schema is None:
        raise InvalidValueError("text.format.schema", None, "given with type json_schema")
    schema = JsonSchemaFormat(name=form.name or "schema", schema=form.json_schema)
    return ResponseFormat(type="json_schema", json_schema=schema)


async def complete_response(router: Router, plan: ResponsePlan) -> ResponseBody:
    """Run a planned request and return the complete answer."""
    answer = _Answer(plan)
    outputs = generate_outputs(router, [plan.chat.call], plan.chat.context.deadline)
    async with aclosing(outputs):
        async for each in outputs:
            large = has_many_logprobs(each.output, plan.chat.names)
            await offload(partial(answer.add, each.output), is_large=large)
    return answer.body()


async def stream_response(
    plan: ResponsePlan, outputs: AsyncGenerator[PromptOutput, None]
) -> AsyncGenerator[bytes, None]:
    """Yield the events of an answer.

    A failure is reported by an event `response.failed`, and then raised as ReportedError.
    """
    answer = _Answer(plan)
    events = _EventEncoder(answer, plan.message_id)
    for data in events.opening():
        yield data
    try:
        async for each in outputs:
            large = has_many_logprobs(each.output, plan.chat.names)
            logprobs = await offload(partial(answer.add, each.output), is_large=large)
            if each.output.text or logprobs:
                delta = partial(events.delta, each.output.text, logprobs)
                yield await offload(delta, is_large=large)
    except Exception as error:
        answer.error = failure_of(error, names=field_names.RESPONSES).details
        yield events.status("failed")
        raise ReportedError(error) from error
    for data in await offload(events.closing, is_large=plan.chat.names is not None):
        yield data


class _EventEncoder:
    """Encoder of the events of a stream, with their sequence numbers."""

    def __init__(self, answer: _Answer, message_id: str) -> None:
        self._answer = answer
        self._part = {"item_id": message_id, "output_index": 0, "content_index": 0}
        self._numbers = itertools.count()

    def opening(self) -> list[bytes]:
        """Encode the events before the first output."""
        return [
            self.status("created"),
            self.status("in_progress"),
            self._item("added"),
            self._encode("content_part.added", **self._part, part=_part("", []).to_dict()),
        ]

    def delta(self, text: str, logprobs: list[TokenLogprob]) -> bytes:
        """Encode an output."""
        content = {"delta": text, "logprobs": _dicts(logprobs)}
        return self._encode("output_text.delta", **self._part, **content)

    def closing(self) -> list[bytes]:
        """Encode the events after the last output."""
        answer = self._answer
        content = {"text": answer.text, "logprobs": _dicts(answer.logprobs)}
        return [
            self._encode("output_text.done", **self._part, **content),
            self._encode("content_part.done", **self._part, part=answer.part().to_dict()),
            self._item("done"),
            self.status(answer.status),
        ]

    def status(self, kind: str) -> bytes:
        """Encode an event with the whole response."""
        return self._encode(kind, response=self._answer.body().to_dict())

    def _item(self, kind: str) -> bytes:
        item = self._answer.message().to_dict()
        return self._encode(f"output_item.{kind}", output_index=0, item=item)

    def _encode(self, kind: str, **fields: Any) -> bytes:
        kind = f"response.{kind}"
        data = {"type": kind, "sequence_number": next(self._numbers), **fields}
        return event(json.dumps(data), kind)


class _Answer:
    """The answer so far."""

    def __init__(self, plan: ResponsePlan) -> None:
        self._plan = plan
        self._meter = UsageMeter()
        self._finish_reason: FinishReason | None = None
        self.text = ""
        self.logprobs: list[TokenLogprob] = []
        self.error: ErrorDetails | None = None

    def add(self, output: RequestOutput) -> list[TokenLogprob]:
        """Append an output and return its log-probabilities, [] if not requested."""
        self._meter.add(0, output)
        self.text += output.text
        self._finish_reason = output.finish_reason
        names = self._plan.chat.names
        if output.logprobs is None or names is None:
            return []
        logprobs = chat_logprobs(output.logprobs, names).content
        self.logprobs += logprobs
        return logprobs

    @property
    def status(self) -> Literal["in_progress", "completed", "incomplete", "failed"]:
        if self.error is not None:
            return "failed"
        match self._finish_reason:
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
            content=[self.part()] if self._meter.has_output else [],
        )

    def body(self) -> ResponseBody:
        plan, request, status = self._plan, self._plan.request, self.status
        is_truncated = status == "incomplete"
        return ResponseBody(
            id=plan.id,
            object="response",
            created_at=plan.chat.info.created,
            status=status,
            model=plan.chat.info.model,
            seed=plan.chat.seed,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            metadata=request.metadata or {},
            output=[self.message()] if self._meter.has_output else [],
            incomplete_details=IncompleteDetails(reason="max_output_tokens")
            if is_truncated
            else None,
            error=_error(self.error) if self.error else None,
            usage=_usage(self._meter.usage()) if self._finish_reason else None,
            tools=[],
            tool_choice="none",
            parallel_tool_calls=False,
            store=False,
        )


def _part(text: str, logprobs: list[TokenLogprob]) -> OutputText:
    return OutputText(type="output_text", text=text, annotations=[], logprobs=logprobs)


def _error(error: ErrorDetails) -> ResponseError:
    return ResponseError(code=error.code or error.type, message=error.message)


def _dicts(logprobs: list[TokenLogprob]) -> list[dict[str, Any]]:
    return [each.to_dict() for each in logprobs]


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
