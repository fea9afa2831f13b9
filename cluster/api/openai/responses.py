"""`/v1/responses`: a chat in OpenAI's newer format, text only, without stored state."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any, Literal

from cluster.api.base.openai_errors import Failure
from cluster.api.base.openai_schema import Usage
from cluster.api.base.sse import event
from cluster.api.openai.answer_reading import AnswerReader
from cluster.api.openai.builders import RequestContext, ResponseBuilder
from cluster.api.openai.chat import ChatBuilder, prepare_chat
from cluster.api.openai.logprobs import TokenLogprob, chat_logprobs
from cluster.api.openai.parsers.pieces import Content
from cluster.api.openai.schemas.chat_schema import ChatRequest, Message
from cluster.api.openai.schemas.responses_schema import (
    IncompleteDetails,
    InputTokensDetails,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    ResponseBody,
    ResponseError,
    ResponsesRequest,
    ResponseUsage,
)
from cluster.api.openai.schemas.sampling_fields import JsonSchemaFormat, ResponseFormat
from cluster.api.openai.streams import PromptOutput
from cluster.replica.router import Router
from specdec.types.errors import InvalidValueError
from specdec.types.responses import EngineOutput, FinishReason


async def prepare_response(
    router: Router, request: ResponsesRequest, context: RequestContext
) -> ResponsesBuilder:
    """Validate and tokenize a request. Raise the errors of its fields."""
    if request.top_logprobs and not request.include:
        limit = "left out unless include contains message.output_text.logprobs"
        raise InvalidValueError("top_logprobs", request.top_logprobs, limit)
    chat = await prepare_chat(router, as_chat(request), context)
    return ResponsesBuilder(request, chat, context.request_id)


def as_chat(request: ResponsesRequest) -> ChatRequest:
    """Convert a request to the equivalent chat."""
    return ChatRequest(
        messages=list(_messages(request)),
        max_completion_tokens=request.max_output_tokens,
        logprobs=bool(request.include),
        response_format=_response_format(request),
        reasoning_effort=(request.reasoning or {}).get("effort"),
        **request.fields_of(ChatRequest),
    )


def _messages(request: ResponsesRequest) -> Iterator[Message]:
    if request.instructions is not None:
        yield Message(role="system", content=request.instructions)
    if isinstance(request.input, str):
        yield Message(role="user", content=request.input)
        return
    for each in request.input:
        content = each.content
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        yield Message(role=each.role, content=text)


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


class ResponsesBuilder(ResponseBuilder):
    """Builder of the response to a request of `/v1/responses`."""

    def __init__(self, request: ResponsesRequest, chat: ChatBuilder, request_id: str) -> None:
        """Make a builder. chat: the equivalent chat."""
        super().__init__(chat.calls, chat.names)
        self._request = request
        self._info = chat.info
        self._id, self._message_id = f"resp_{request_id}", f"msg_{request_id}"
        self._part = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        self._numbers = itertools.count()  # of the events
        self._finish_reason: FinishReason | None = None
        self._reader = AnswerReader(chat.reading)
        self.thinking_budget = chat.thinking_budget
        self._text = ""
        self._logprobs: list[TokenLogprob] = []
        self._error: ResponseError | None = None

    def add(self, each: PromptOutput) -> None:
        """Add an output to the complete response."""
        self._append(each.output)

    def body(self) -> ResponseBody:
        """Build the response so far."""
        request, status = self._request, self._status
        truncated = IncompleteDetails(reason="max_output_tokens")
        return ResponseBody(
            id=self._id,
            object="response",
            created_at=self._info.created,
            status=status,
            model=self._info.model,
            seed=self._info.seed,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            metadata=request.metadata or {},
            output=[self._message()] if self.meter.has_output else [],
            incomplete_details=truncated if status == "incomplete" else None,
            error=self._error,
            usage=_usage(self._used()) if self._finish_reason else None,
            tools=[],
            tool_choice="none",
            parallel_tool_calls=False,
            store=False,
        )

    def opening(self) -> list[bytes]:
        """Encode the events before the first output."""
        return [
            self._body_event("created"),
            self._body_event("in_progress"),
            self._item_event("added"),
            self._event("content_part.added", **self._part, part=_part("", []).to_dict()),
        ]

    def events(self, each: PromptOutput) -> list[bytes]:
        """Encode an output as a delta, unless it adds no text."""
        length = len(self._text)
        logprobs = self._append(each.output)
        text = self._text[length:]
        if not (text or logprobs):
            return []
        content = {"delta": text, "logprobs": [each.to_dict() for each in logprobs]}
        return [self._event("output_text.delta", **self._part, **content)]

    def closing(self) -> list[bytes]:
        """Encode the events after the last output."""
        part = _part(self._text, self._logprobs).to_dict()
        content = {"text": part["text"], "logprobs": part["logprobs"]}
        return [
            self._event("output_text.done", **self._part, **content),
            self._event("content_part.done", **self._part, part=part),
            self._item_event("done"),
            self._body_event(self._status),
        ]

    def failed(self, failure: Failure) -> list[bytes]:
        """Encode an error as the last event."""
        details = failure.details
        self._error = ResponseError(code=details.code or details.type, message=details.message)
        return [self._body_event("failed")]

    def _append(self, output: EngineOutput) -> list[TokenLogprob]:
        """Append an output and return its log-probabilities, [] if not requested."""
        self.meter.add(0, output)
        self._text += self._content(output)
        self._finish_reason = output.finish_reason
        if output.logprobs is None or self.names is None:
            return []
        logprobs = chat_logprobs(output.logprobs, self.names).content
        self._logprobs += logprobs
        return logprobs

    def _content(self, output: EngineOutput) -> str:
        """Return the text of an output without the model's reasoning."""
        pieces = self._reader.read(output)
        return "".join(each.text for each in pieces if isinstance(each, Content))

    def _used(self) -> Usage:
        return self.meter.usage(num_reasoning_tokens=self._reader.num_reasoning_tokens)

    @property
    def _status(self) -> Literal["in_progress", "completed", "incomplete", "failed"]:
        if self._error is not None:
            return "failed"
        match self._finish_reason:
            case None:
                return "in_progress"
            case FinishReason.LENGTH:
                return "incomplete"
            case FinishReason.STOP:
                return "completed"

    def _message(self) -> OutputMessage:
        status = self._status
        return OutputMessage(
            type="message",
            id=self._message_id,
            role="assistant",
            status="incomplete" if status == "failed" else status,
            content=[_part(self._text, self._logprobs)] if self.meter.has_output else [],
        )

    def _body_event(self, kind: str) -> bytes:
        return self._event(kind, response=self.body().to_dict())

    def _item_event(self, kind: str) -> bytes:
        item = self._message().to_dict()
        return self._event(f"output_item.{kind}", output_index=0, item=item)

    def _event(self, kind: str, **fields: Any) -> bytes:
        kind = f"response.{kind}"
        data = {"type": kind, "sequence_number": next(self._numbers), **fields}
        return event(json.dumps(data), kind)


def _part(text: str, logprobs: list[TokenLogprob]) -> OutputText:
    return OutputText(type="output_text", text=text, annotations=[], logprobs=logprobs)


def _usage(usage: Usage) -> ResponseUsage:
    cached, details = usage.prompt_tokens_details.cached_tokens, usage.completion_tokens_details
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=cached, cache_write_tokens=0),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(
            reasoning_tokens=details.reasoning_tokens, speculation=details.speculation
        ),
        total_tokens=usage.total_tokens,
    )
