"""Incremental parser that separates a model's reasoning from its answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cluster.api.openai.parsers.json_span import json_or_none
from cluster.api.openai.parsers.pieces import (
    AnswerParser,
    CallArguments,
    CallStart,
    Content,
    Piece,
    PlainParser,
    Reasoning,
    TrailingSpace,
    first_mark,
)
from specdec.types.sampling.reasoning_marks import ReasoningMarks

_State = Literal["start", "reasoning", "answer"]


@dataclass(frozen=True)
class ReasoningSyntax:
    """Syntax of a model family.

    openings, closings: marks around the reasoning, which comes first. begins_inside: whether a text
    without any mark is reasoning; where the prompt does not show it, that of the family. has_begun:
    whether the model continues a text in the prompt, which no opening mark can follow. has_ended:
    whether the reasoning has ended in the prompt.
    """

    openings: tuple[str, ...]
    closings: tuple[str, ...]
    begins_inside: bool = False
    has_begun: bool = False
    has_ended: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks."""
        return self.openings + self.closings

    def is_open(self, text: str) -> bool:
        """Return whether a text, cut anywhere, ends in reasoning, or may be about to begin it."""
        parser = ReasoningParser(self, PlainParser)
        list(parser.feed(text))
        return parser.is_open

    def after(self, start: str) -> ReasoningSyntax:
        """Return the syntax of the rest of an answer that begins with `start` in the prompt."""
        opened, closed = _last_end(start, self.openings), _last_end(start, self.closings)
        has_begun = bool(start[max(opened, closed) :].strip())
        ended = closed > opened
        return replace(self, begins_inside=opened > closed, has_begun=has_begun, has_ended=ended)

    @property
    def before_constrained(self) -> ReasoningMarks | None:
        """The marks of reasoning before a text that a grammar constrains; None if there is none."""
        if not self.begins_inside and (self.has_begun or self.has_ended):
            return None
        return ReasoningMarks(self.openings, self.closings, self.begins_inside)


_THINK = ("<think>",), ("</think>",)

SYNTAXES: Mapping[str, ReasoningSyntax] = {
    "deepseek_r1": ReasoningSyntax(*_THINK, begins_inside=True),
    "qwen3": ReasoningSyntax(*_THINK),
    "granite": ReasoningSyntax(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
    "gemma4": ReasoningSyntax(("<|channel>thought",), ("<channel|>",)),
    "seed_oss": ReasoningSyntax(("<seed:think>",), ("</seed:think>",)),
}
"""Syntax of each family, by the name of its parser in vLLM and SGLang."""


def _last_end(text: str, marks: Sequence[str]) -> int:
    """Return the end of the last mark in a text; 0 without any."""
    return max(text.rfind(mark) + len(mark) if mark in text else 0 for mark in marks)


class ReasoningParser:
    """Parser of one answer; what follows the reasoning goes to the parser of answers.

    Whitespace around the reasoning is dropped, and so is a mark that the prompt has already. Some
    models leave out the closing mark before calls: reasoning is withheld from the mark of a call on
    as long as nothing else than calls follows, and if the answer ends there, it is these calls.

    num_reasoning_chars: characters up to the end of the reasoning, or of what is known of it.
    """

    def __init__(
        self,
        syntax: ReasoningSyntax,
        make_answer: Callable[[], AnswerParser],
        call_marks: Sequence[str] = (),
    ) -> None:
        """make_answer: makes a parser of the text after the reasoning. call_marks: before calls."""
        self._syntax = syntax
        self._make_answer = make_answer
        self._answer = make_answer()
        self._marks = (*syntax.closings, *call_marks)
        self._trial: _CallTrial | None = None
        self._state: _State = self._first_state if syntax.has_begun else "start"
        self._buffer = ""
        self._num_chars = 0  # that were fed
        self.num_reasoning_chars = 0
        self._space = TrailingSpace()  # of the reasoning
        self._has_reasoning = syntax.has_begun
        self._has_answer = self._state == "answer"

    @property
    def num_calls(self) -> int:
        """Calls that were parsed so far."""
        return self._answer.num_calls

    @property
    def is_reasoning(self) -> bool:
        """Return whether the text so far ends in reasoning that is known to be no call."""
        return self._state == "reasoning" and not self._num_withheld

    @property
    def _num_withheld(self) -> int:
        """Number of characters that are not assigned yet."""
        return len(self._buffer) + (self._trial.num_chars if self._trial else 0)

    @property
    def is_open(self) -> bool:
        """Return whether it ends in reasoning, or may be about to begin it."""
        may_open = self._syntax.begins_inside or _may_begin(self._buffer, self._syntax.openings)
        return self._state == "reasoning" or (self._state == "start" and may_open)

    def feed(self, text: str) -> Iterator[Piece]:
        """Add `text` and yield the pieces that are complete."""
        self._buffer += text
        self._num_chars += len(text)
        if self._state == "start":
            self._read_start()
        if self._state == "reasoning":
            yield from self._read_reasoning()
        if self._state == "answer":
            yield from self._read_answer()

    def finish(self, *, is_cut: bool = False) -> Iterator[Piece]:
        """Yield the rest at the end of the answer."""
        rest, self._buffer = self._buffer, ""
        if is_cut and len(rest) > 1:  # the beginning of a mark
            rest = ""
        if self._state == "reasoning":
            yield from self._think(rest)
            if self._trial and not is_cut and (calls := self._trial.calls()):
                self._state, self._answer = "answer", self._trial.parser
                yield from calls
                return
            yield from self._release()
        else:
            yield from self._answer.feed(rest)
        yield from self._answer.finish(is_cut=is_cut)

    def _read_start(self) -> None:
        """Find out whether the text begins with reasoning; that may be empty, but for its end."""
        syntax, rest = self._syntax, self._buffer.lstrip()
        mark = next(filter(rest.startswith, syntax.marks), None)
        if mark is not None:
            self._buffer = rest.removeprefix(mark) if mark in syntax.openings else rest
            self._state = "reasoning"
        elif not _may_begin(rest, syntax.marks):
            self._state = self._first_state

    @property
    def _first_state(self) -> _State:
        return "reasoning" if self._syntax.begins_inside else "answer"

    def _read_reasoning(self) -> Iterator[Piece]:
        mark: str | None = ""
        while mark is not None and self._state == "reasoning":
            start, mark = first_mark(self._buffer, self._marks)
            text, self._buffer = self._buffer[:start], self._buffer[start:]
            yield from self._think(text)
            if mark in self._syntax.closings:
                yield from self._release()
                self._end_reasoning(len(mark))
            elif mark is not None:
                self._buffer = self._buffer[len(mark) :]
                self._trial = self._trial or _CallTrial(self._make_answer())
                yield from self._think(mark)
        if self._state == "reasoning":
            self.num_reasoning_chars = self._num_chars - self._num_withheld

    def _end_reasoning(self, mark_length: int) -> None:
        rest = self._buffer[mark_length:]
        self.num_reasoning_chars = self._num_chars - len(rest)
        self._buffer, self._state = rest.lstrip(), "answer"
        self._space.take()
        self._has_answer = bool(self._buffer)
        self._has_reasoning = True

    def _think(self, text: str) -> Iterator[Reasoning]:
        """Yield reasoning, or withhold it while it may be calls."""
        if self._trial is None:
            yield from self._reasoning(text)
        elif not self._trial.accepts(text):
            yield from self._release()

    def _release(self) -> Iterator[Reasoning]:
        trial, self._trial = self._trial, None
        if trial is not None:
            yield from self._reasoning(trial.text)

    def _reasoning(self, text: str) -> Iterator[Reasoning]:
        if kept := self._space.withhold(text if self._has_reasoning else text.lstrip()):
            self._has_reasoning = True
            yield Reasoning(kept)

    def _read_answer(self) -> Iterator[Piece]:
        """Pass the answer on, without the whitespace between reasoning and answer."""
        if self._has_reasoning and not self._has_answer:
            self._buffer = self._buffer.lstrip()
            self._has_answer = bool(self._buffer)
        text, self._buffer = self._buffer, ""
        if text:
            yield from self._answer.feed(text)


class _CallTrial:
    """Reasoning from the mark of a call on, which is calls if nothing else follows them.

    num_chars: of all of it.
    """

    def __init__(self, parser: AnswerParser) -> None:
        self.parser = parser
        self.num_chars = 0
        self._texts: list[str] = []
        self._pieces: list[Piece] = []

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self._texts)

    def accepts(self, text: str) -> bool:
        """Add `text`; return whether all of it may still be calls."""
        self._texts.append(text)
        self.num_chars += len(text)
        return self._adds(self.parser.feed(text))

    def calls(self) -> list[Piece]:
        """Return the pieces of an answer that ends here; none unless it is whole calls."""
        if not self._adds(self.parser.finish()):
            return []
        arguments = ["" for each in self._pieces if isinstance(each, CallStart)]
        for each in self._pieces:
            if isinstance(each, CallArguments):
                arguments[each.index] += each.text
        return self._pieces if None not in map(json_or_none, arguments) else []

    def _adds(self, pieces: Iterable[Piece]) -> bool:
        """Add pieces; return whether none of them is a text."""
        added = list(pieces)
        self._pieces += added
        return not any(isinstance(each, Content) for each in added)


def _may_begin(text: str, marks: Sequence[str]) -> bool:
    """Return whether a text is the beginning of a mark, but for whitespace before it."""
    return any(mark.startswith(text.lstrip()) for mark in marks)
