"""`/v1/messages`: prepares a message and builds its response."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from cluster.api.anthropic.conversion import to_chat
from cluster.api.anthropic.input_json import InputWriter
from cluster.api.anthropic.schema import MessagesRequest
from cluster.api.base.anthropic_errors import error_event
from cluster.api.base.openai_errors import Failure
from cluster.api.base.openai_schema import ResponseModel
from cluster.api.base.sse import json_event
from cluster.api.openai.answer_reading import AnswerReader
from cluster.api.openai.builders import RequestContext, ResponseBuilder, limit_to_context
from cluster.api.openai.chat import ChatBuilder, prepare_chat
from cluster.api.openai.parsers.json_span import json_or_none
from cluster.api.openai.parsers.pieces import (
    CallArguments,
    CallStart,
    Content,
    Piece,
    Reasoning,
    json_text,
)
from cluster.api.openai.parsers.reasoning import SYNTAXES
from cluster.api.openai.request_warnings import RequestWarning
from cluster.api.openai.streams import PromptOutput
from cluster.replica.router import Router
from specdec.types.request import GenerateRequest
from specdec.types.responses import EngineOutput, FinishReason


async def prepare_messages(
    router: Router, request: MessagesRequest, context: RequestContext
) -> MessagesBuilder:
    """Validate and tokenize a request. Raise the errors of its fields."""
    router.check_admission(request.model or "", 1)  # before the template: it waits for loading
    has_parser = router.config.reasoning_parser in SYNTAXES
    if request.thinking and request.thinking.budget_tokens and not has_parser:
        text = "ignored: the service has no reasoning parser with marks"
        context.warnings.append(RequestWarning("thinking_token_budget", text))
    given = to_chat(request, router.text.chat_template, has_parser=has_parser)
    chat = await prepare_chat(router, given, context)
    # Clients have to send `max_tokens`, and take the context of Anthropic's models for granted.
    limited = limit_to_context(chat.calls[0], router.max_model_len)
    return MessagesBuilder(request, chat, limited, f"msg_{context.request_id}")


class MessageBody(ResponseModel):
    """The response without streaming."""

    message: dict[str, Any] = Field(description="in Anthropic's format")

    def to_json(self) -> str:
        """Serialize to one line of JSON."""
        return json_text(self.message)


class MessagesBuilder(ResponseBuilder):
    """Builder of the response to a request of `/v1/messages`.

    The pieces of an answer become content blocks; a block ends where one of another kind begins.
    """

    def __init__(
        self, request: MessagesRequest, chat: ChatBuilder, call: GenerateRequest, message_id: str
    ) -> None:
        """Make a builder. chat: the equivalent chat. call: its call, within the context."""
        super().__init__([call], None)
        self._is_limited = call is not chat.calls[0]
        self._manages_context = request.context_management is not None
        self._reader = AnswerReader(chat.reading, escapes=False)  # the writer of the input does
        self.forced_calls = chat.forced_calls
        self._info = chat.info
        self._id = message_id
        self._blocks: list[dict[str, Any]] = []
        self._input = InputWriter()  # of the last call
        self._last: EngineOutput | None = None

    def add(self, each: PromptOutput) -> None:
        """Add an output to the complete response."""
        for _ in self._changes(each):
            pass

    def body(self) -> MessageBody:
        """Build the complete response."""
        blocks = [_complete(block) for block in self._blocks]
        return MessageBody(message={**self._message(), "content": blocks})

    @property
    def keep_alive(self) -> bytes:
        """The event that Anthropic sends in a long silence."""
        return json_event("ping", {"type": "ping"})

    def opening(self) -> list[bytes]:
        """Encode the start, which comes before the number of prompt tokens is known."""
        return []

    def events(self, each: PromptOutput) -> list[bytes]:
        """Encode an output; the first one with the start of the message."""
        is_first = not self.meter.has_output
        changes = list(self._changes(each))
        if is_first:
            message = {**self._message(), "content": [], "stop_reason": None}
            changes.insert(0, {"type": "message_start", "message": message})
        return [json_event(change["type"], change) for change in changes]

    def closing(self) -> list[bytes]:
        """Encode the end of the last block and of the message."""
        changes: list[dict[str, Any]] = []
        if self._blocks:
            changes.append({"type": "content_block_stop", "index": len(self._blocks) - 1})
        message = self._message()
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        usage = {"usage": message["usage"], **self._context_management()}
        changes.append({"type": "message_delta", "delta": delta, **usage})
        changes.append({"type": "message_stop"})
        return [json_event(change["type"], change) for change in changes]

    def failed(self, failure: Failure) -> list[bytes]:
        """Encode an error as the last event."""
        return [error_event(failure)]

    def _changes(self, each: PromptOutput) -> Iterator[dict[str, Any]]:
        """Add an output and yield the changes of the blocks."""
        self.meter.add(each.prompt, each.output)
        self._last = each.output
        for piece in self._reader.read(each.output):
            yield from self._add(piece)
        if each.output.finish_reason not in (None, FinishReason.LENGTH):
            yield from self._end_input()

    def _add(self, piece: Piece) -> Iterator[dict[str, Any]]:
        match piece:
            case Content():
                yield from self._extend("text", "text", "text_delta", piece.text)
            case Reasoning():
                yield from self._extend("thinking", "thinking", "thinking_delta", piece.text)
            case CallStart():
                yield from self._begin(
                    {"type": "tool_use", "id": piece.call_id, "name": piece.name, "input": ""}
                )
                self._input = InputWriter()
            case CallArguments():
                yield from self._add_input(self._input.feed(piece.text))

    def _extend(self, kind: str, field: str, delta: str, text: str) -> Iterator[dict[str, Any]]:
        if not self._blocks or self._blocks[-1]["type"] != kind:
            block = {"type": kind, field: ""}
            yield from self._begin(block if kind == "text" else {**block, "signature": ""})
        self._blocks[-1][field] += text
        yield self._delta({"type": delta, field: text})

    def _add_input(self, text: str) -> Iterator[dict[str, Any]]:
        if text:
            self._blocks[-1]["input"] += text
            yield self._delta({"type": "input_json_delta", "partial_json": text})

    def _end_input(self) -> Iterator[dict[str, Any]]:
        """Complete the input of the last block if that is a call."""
        if self._blocks and self._blocks[-1]["type"] == "tool_use":
            yield from self._add_input(self._input.finish())

    def _begin(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._end_input()
        if self._blocks:
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}
        self._blocks.append(block)
        index = len(self._blocks) - 1
        shown = {**block, "input": {}} if block["type"] == "tool_use" else dict(block)
        yield {"type": "content_block_start", "index": index, "content_block": shown}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _message(self) -> dict[str, Any]:
        reason, sequence = self._stop()
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._info.model,
            "content": [],
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._usage(),
            **self._context_management(),
        }

    def _context_management(self) -> dict[str, Any]:
        """Return the report of edits, of which none is applied, to a client that asks for some."""
        return {"context_management": {"applied_edits": []}} if self._manages_context else {}

    def _stop(self) -> tuple[str | None, str | None]:
        last = self._last
        if last is None or last.finish_reason is None:
            return None, None
        if last.finish_reason is FinishReason.LENGTH:
            return "model_context_window_exceeded" if self._is_limited else "max_tokens", None
        if isinstance(last.stop_reason, str):
            return "stop_sequence", last.stop_reason
        return "tool_use" if self._reader.num_calls else "end_turn", None

    def _usage(self) -> dict[str, Any]:
        usage = self.meter.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
            "speculation": usage["completion_tokens_details"]["speculation"],
        }


def _complete(block: dict[str, Any]) -> dict[str, Any]:
    """Return a block with the arguments of a call as an object; those that are cut have none."""
    if block["type"] != "tool_use":
        return block
    return {**block, "input": json_or_none(block["input"]) or {}}
