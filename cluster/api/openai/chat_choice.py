"""One choice of a chat's answer: text, tool calls and log-probabilities, complete or streamed."""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from cluster.api.openai.chat_schema import (
    AnsweredFunction,
    AnsweredToolCall,
    AnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    Delta,
    FunctionDelta,
    ToolCallDelta,
)
from cluster.api.openai.logprobs import ChoiceLogprobs, TokenNames, chat_logprobs
from cluster.api.openai.schema import FinishReason
from cluster.api.openai.tool_parser import CallStart, Content, Piece, ToolCallParser
from specdec.types import responses
from specdec.types.outputs import EngineOutput


class ChoiceWriter:
    """Builder of one choice: `chunk` for a stream, `add` and `choice` for a complete answer."""

    def __init__(
        self,
        index: int,
        parser: ToolCallParser | None,
        names: TokenNames | None,
        *,
        returns_token_ids: bool,
        prefix: str = "",
    ) -> None:
        """Make a builder; `parser` is None without tools, `names` without log-probabilities."""
        self._index = index
        self._parser = parser
        self._names = names
        self._returns_token_ids = returns_token_ids
        self._prefix = prefix
        self._outputs: list[EngineOutput] = []

    def opening(self) -> ChatChunkChoice:
        """Return the first chunk of a stream, which has the role and no text."""
        delta = Delta(role="assistant", content=self._prefix)
        return ChatChunkChoice(index=self._index, delta=delta, logprobs=None, finish_reason=None)

    def chunk(self, output: EngineOutput) -> ChatChunkChoice | None:
        """Convert an output to a chunk; return None if it adds nothing visible."""
        pieces = self._pieces(output)
        logprobs = self._logprobs([output])
        if not (pieces or logprobs or output.finish_reason or self._returns_token_ids):
            return None
        choice = ChatChunkChoice(
            index=self._index,
            delta=_delta(pieces),
            logprobs=logprobs,
            finish_reason=self._finish_reason(output),
        )
        if output.finish_reason is not None:
            choice.stop_reason = output.stop_reason
        if self._returns_token_ids:
            choice.token_ids = list(output.token_ids)
        return choice

    def add(self, output: EngineOutput) -> None:
        """Keep an output for `choice`."""
        self._outputs.append(output)

    def choice(self) -> ChatChoice:
        """Build the complete choice from the outputs that were added."""
        pieces = [piece for output in self._outputs for piece in self._pieces(output)]
        last = self._outputs[-1]
        reason = self._finish_reason(last)
        assert reason is not None, "the last output has a finish reason"
        choice = ChatChoice(
            index=self._index,
            message=self._message(pieces),
            logprobs=self._logprobs(self._outputs),
            finish_reason=reason,
            stop_reason=last.stop_reason,
        )
        if self._returns_token_ids:
            choice.token_ids = [each for output in self._outputs for each in output.token_ids]
        return choice

    def _pieces(self, output: EngineOutput) -> list[Piece]:
        if self._parser is None:
            return [Content(output.text)] if output.text else []
        pieces = list(self._parser.feed(output.text))
        if output.finish_reason is not None:
            pieces += self._parser.finish()
        return pieces

    def _message(self, pieces: Iterable[Piece]) -> AnswerMessage:
        text, calls = self._prefix, list[AnsweredToolCall]()
        for piece in pieces:
            match piece:
                case Content():
                    text += piece.text
                case CallStart():
                    calls.append(_call(piece.name))
                case _:
                    calls[-1].function.arguments += piece.text
        message = AnswerMessage(role="assistant", content=text if text or not calls else None)
        message.refusal = None  # set, and thus serialized as null
        if calls:
            message.tool_calls = calls
        return message

    def _logprobs(self, outputs: Iterable[EngineOutput]) -> ChoiceLogprobs | None:
        if self._names is None:
            return None
        parts = [each.logprobs for each in outputs if each.logprobs is not None]
        content = [each for part in parts for each in chat_logprobs(part, self._names).content]
        return ChoiceLogprobs(content=content, refusal=None)

    def _finish_reason(self, output: EngineOutput) -> FinishReason | None:
        if output.finish_reason is None:
            return None
        if output.finish_reason is responses.FinishReason.LENGTH:
            return "length"
        has_calls = self._parser is not None and self._parser.num_calls > 0
        return "tool_calls" if has_calls else "stop"


def _call(name: str) -> AnsweredToolCall:
    function = AnsweredFunction(name=name, arguments="")
    return AnsweredToolCall(id=_call_id(), type="function", function=function)


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _delta(pieces: Iterable[Piece]) -> Delta:
    """Merge the pieces of one output."""
    delta = Delta()
    calls: dict[int, ToolCallDelta] = {}
    for piece in pieces:
        match piece:
            case Content():
                delta.content = (delta.content or "") + piece.text
            case CallStart():
                function = FunctionDelta(name=piece.name, arguments="")
                calls[piece.index] = ToolCallDelta(
                    index=piece.index, id=_call_id(), type="function", function=function
                )
            case _ if piece.index in calls:
                calls[piece.index].function.arguments += piece.text
            case _:
                function = FunctionDelta(arguments=piece.text)
                calls[piece.index] = ToolCallDelta(index=piece.index, function=function)
    if calls:
        delta.tool_calls = list(calls.values())
    return delta
