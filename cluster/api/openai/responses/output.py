"""Output items of `/v1/responses`, made from the pieces of an answer, and their events."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from cluster.api.openai.logprobs import TokenLogprob
from cluster.api.openai.parsers.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from cluster.api.openai.responses.tools import custom_input
from cluster.api.openai.schemas.response_items import (
    CustomTool,
    ItemStatus,
    OutputCustomCall,
    OutputFunctionCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    PlacedTool,
    ReasoningText,
    SummaryText,
)

Change = tuple[str, dict[str, Any]]
"""An event: its type without `response.`, and its fields."""

TextLogprob = tuple[TokenLogprob, str]
"""The log-probability of a token, and what the token has added to the text."""


class OutputItems:
    """Output items of one answer. An item ends where one of another kind begins."""

    def __init__(
        self, request_id: str, tools: Iterable[PlacedTool], *, has_summary: bool = False
    ) -> None:
        """Start without items. has_summary: whether the text of reasoning is its summary, too."""
        self.items: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._request_id, self._has_summary = request_id, has_summary
        self._tools = {each.function_name: each for each in tools}
        self._arguments = ""  # of the call that is open
        self._logprobs: list[TextLogprob] = []  # of tokens whose text is withheld

    def add(
        self, pieces: Sequence[Piece], logprobs: Iterable[TextLogprob] = ()
    ) -> Iterator[Change]:
        """Add pieces and yield their events.

        logprobs: of a token, which has completed the pieces. Only messages have them: those of the
        last tokens, withheld ones too, that their text is of.
        """
        self._logprobs += logprobs
        if pieces:
            text = "".join(each.text for each in pieces if isinstance(each, Content))
            self._logprobs = _of_text(self._logprobs, text, follows_mark=self._follows_mark)
        for piece in pieces:
            match piece:
                case Content():
                    yield from self._add_text(piece.text)
                case Reasoning():
                    yield from self._add_reasoning(piece.text)
                case CallStart():
                    yield from self._begin_call(piece)
                case CallArguments():
                    yield from self._add_arguments(piece.text)

    def finish(self, *, is_complete: bool) -> Iterator[Change]:
        """End the last item and yield its events. An answer without any is an empty message."""
        self._logprobs = _of_text(self._logprobs, "", follows_mark=True)
        if not self.items or (self._logprobs and isinstance(self._open, OutputMessage)):
            yield from self._add_text("")
        yield from self._end("completed" if is_complete else "incomplete")

    def interrupt(self) -> None:
        """Mark an item that has not ended as incomplete, with what came of it."""
        if self._open is not None:
            self._fill(self._open)
            self._open.status = "incomplete"

    @property
    def ends_with_call(self) -> bool:
        """Return whether the item that has not ended is a call."""
        return isinstance(self._open, OutputFunctionCall | OutputCustomCall)

    @property
    def _follows_mark(self) -> bool:
        """Return whether the text that comes next is after a mark, which is of no item."""
        return self._open is not None and not isinstance(self._open, OutputMessage)

    def _fill(self, item: OutputItem) -> None:
        """Give a call what it has of its arguments."""
        match item:
            case OutputFunctionCall():
                item.arguments = self._arguments
            case OutputCustomCall():
                item.input = custom_input(self._arguments)

    def _add_text(self, text: str) -> Iterator[Change]:
        message = self._open
        if not isinstance(message, OutputMessage):
            fields = self._common("msg")
            message = OutputMessage(type="message", role="assistant", content=[], **fields)
            yield from self._begin(message)
            part = OutputText(type="output_text", text="", annotations=[], logprobs=[])
            yield self._in_part("content_part.added", part=part.to_dict())
            message.content.append(part)
        part, logprobs = message.content[0], [each for each, _ in self._logprobs]
        part.text += text
        part.logprobs += logprobs
        self._logprobs = []
        if text or logprobs:
            shown = [each.to_dict() for each in logprobs]
            yield self._in_part("output_text.delta", delta=text, logprobs=shown)

    def _add_reasoning(self, text: str) -> Iterator[Change]:
        reasoning = self._open
        if not isinstance(reasoning, OutputReasoning):
            fields = self._common("rs")
            reasoning = OutputReasoning(type="reasoning", summary=[], content=[], **fields)
            yield from self._begin(reasoning)
            part = ReasoningText(type="reasoning_text", text="")
            yield self._in_part("content_part.added", part=part.to_dict())
            reasoning.content.append(part)
            if self._has_summary:
                summary = SummaryText(type="summary_text", text="")
                yield self._in_summary("part.added", part=summary.to_dict())
                reasoning.summary.append(summary)
        reasoning.content[0].text += text
        yield self._in_part("reasoning_text.delta", delta=text)
        for summary in reasoning.summary:
            summary.text += text
            yield self._in_summary("text.delta", delta=text)

    def _begin_call(self, start: CallStart) -> Iterator[Change]:
        placed = self._tools[start.name]
        named = {"name": placed.tool.name, "call_id": start.call_id}
        if placed.namespace is not None:
            named["namespace"] = placed.namespace
        if isinstance(placed.tool, CustomTool):
            common = self._common("ctc") | named
            yield from self._begin(OutputCustomCall(type="custom_tool_call", input="", **common))
        else:
            common = self._common("fc") | named
            yield from self._begin(OutputFunctionCall(type="function_call", arguments="", **common))
        self._arguments = ""

    def _add_arguments(self, text: str) -> Iterator[Change]:
        self._arguments += text
        if isinstance(self._open, OutputFunctionCall):
            yield self._in_item("function_call_arguments.delta", delta=text)

    def _begin(self, item: OutputItem) -> Iterator[Change]:
        yield from self._end("completed")
        self.items.append(item)
        self._open = item
        yield self._item_event("added")

    def _end(self, status: ItemStatus) -> Iterator[Change]:
        """End the open item, if there is one."""
        item = self._open
        if item is None:
            return
        self._fill(item)
        match item:
            case OutputMessage(content=[part]):
                shown = part.to_dict()
                done = {name: shown[name] for name in ("text", "logprobs")}
                yield self._in_part("output_text.done", **done)
                yield self._in_part("content_part.done", part=shown)
            case OutputReasoning(content=[part]):
                yield self._in_part("reasoning_text.done", text=part.text)
                yield self._in_part("content_part.done", part=part.to_dict())
                for summary in item.summary:
                    yield self._in_summary("text.done", text=summary.text)
                    yield self._in_summary("part.done", part=summary.to_dict())
            case OutputFunctionCall():
                done = {"name": item.name, "arguments": item.arguments}
                yield self._in_item("function_call_arguments.done", **done)
            case OutputCustomCall():
                yield self._in_item("custom_tool_call_input.delta", delta=item.input)
                yield self._in_item("custom_tool_call_input.done", input=item.input)
        item.status = status
        yield self._item_event("done")
        self._open = None

    def _common(self, prefix: str) -> dict[str, Any]:
        """Return the fields of a new item that all kinds have."""
        return {"id": f"{prefix}_{self._request_id}_{len(self.items)}", "status": "in_progress"}

    def _item_event(self, kind: str) -> Change:
        place = len(self.items) - 1
        return f"output_item.{kind}", {"output_index": place, "item": self.items[-1].to_dict()}

    def _in_item(self, kind: str, **fields: Any) -> Change:
        """Return an event of the last item."""
        place = {"item_id": self.items[-1].id, "output_index": len(self.items) - 1}
        return kind, {**place, **fields}

    def _in_part(self, kind: str, **fields: Any) -> Change:
        """Return an event of the only part of the last item."""
        return self._in_item(kind, content_index=0, **fields)

    def _in_summary(self, kind: str, **fields: Any) -> Change:
        """Return an event of the only part of the summary of the last item."""
        return self._in_item(f"reasoning_summary_{kind}", summary_index=0, **fields)


def _of_text(logprobs: list[TextLogprob], text: str, *, follows_mark: bool) -> list[TextLogprob]:
    """Return those of the tokens that a text is of, and of the tokens after them.

    A mark before the text may contain it, and so may what is withheld after it; where a mark has
    just ended, nothing is. Tokens that do not begin with the text begin with a mark.
    Tokens that have added nothing, as the first ones of a character, count to what follows them.
    Space at the beginning of the text may be of a token that the text before has had.
    """
    joined, core = "".join(added for _, added in logprobs), text.lstrip() or text
    begins = text and (joined.startswith(text) or joined.lstrip().startswith(core))
    found = joined.find(core) if begins and not follows_mark else joined.rfind(core)
    place, num_spaces = max(0, found), len(text) - len(core)
    while num_spaces and place and joined[place - 1].isspace():
        place, num_spaces = place - 1, num_spaces - 1
    start = bisect_right(list(accumulate(len(added) for _, added in logprobs)), place)
    while start and not logprobs[start - 1][1]:
        start -= 1
    return logprobs[start:]
