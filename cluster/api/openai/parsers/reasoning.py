"""Incremental parser that separates a model's reasoning from its answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from cluster.api.openai.parsers.pieces import AnswerParser, Piece, Reasoning, first_mark

_State = Literal["start", "reasoning", "answer"]


@dataclass(frozen=True)
class ReasoningSyntax:
    """Syntax of a model family.

    openings, closings: marks around the reasoning, which comes first. begins_inside: whether the
    prompt ends with the opening mark, so that a text without any mark is reasoning.
    """

    openings: tuple[str, ...]
    closings: tuple[str, ...]
    begins_inside: bool = False

    def is_open(self, text: str) -> bool:
        """Return whether a text, cut anywhere, ends in reasoning, or may be about to begin it."""
        if any(mark in text for mark in self.closings):
            return False
        start = text.lstrip()
        may_begin = start.startswith(self.openings) or self.may_open(start)
        return self.begins_inside or may_begin

    def may_open(self, start: str) -> bool:
        """Return whether a text is the beginning of an opening mark."""
        return any(mark.startswith(start) for mark in self.openings)

    def behind(self, prefix: str) -> ReasoningSyntax:
        """Return the syntax of what continues an answer that begins with `prefix`."""
        outside = replace(self, begins_inside=False)
        return replace(outside, begins_inside=outside.is_open(prefix))


_THINK = ("<think>",), ("</think>",)

SYNTAXES: Mapping[str, ReasoningSyntax] = {
    "deepseek_r1": ReasoningSyntax(*_THINK, begins_inside=True),
    "qwen3": ReasoningSyntax(*_THINK),
    "granite": ReasoningSyntax(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
}
"""Syntax of each family, by the name of its parser in vLLM and SGLang."""


class ReasoningParser:
    """Parser of one answer; what follows the reasoning goes to the parser of answers.

    Whitespace around the reasoning is dropped.
    """

    def __init__(self, syntax: ReasoningSyntax, answer: AnswerParser) -> None:
        """answer: parser of the text after the reasoning."""
        self._syntax = syntax
        self._answer = answer
        self._state: _State = "start"
        self._buffer = ""
        self._space = ""  # of the reasoning, withheld until more of it follows
        self._has_reasoning = self._has_answer = False

    @property
    def num_calls(self) -> int:
        """Calls that were parsed so far."""
        return self._answer.num_calls

    def feed(self, text: str) -> Iterator[Piece]:
        """Add `text` and yield the pieces that are complete."""
        self._buffer += text
        if self._state == "start":
            self._read_start()
        if self._state == "reasoning":
            yield from self._read_reasoning()
        if self._state == "answer":
            yield from self._read_answer()

    def finish(self) -> Iterator[Piece]:
        """Yield the rest at the end of the answer."""
        rest, self._buffer = self._buffer, ""
        if self._state == "reasoning":
            yield from self._reasoning(rest)
        else:
            yield from self._answer.feed(rest)
        yield from self._answer.finish()

    def _read_start(self) -> None:
        rest = self._buffer.lstrip()
        start, mark = first_mark(rest, self._syntax.openings)
        if mark is not None and start == 0:
            self._buffer, self._state = rest[len(mark) :], "reasoning"
        elif start > 0 or (rest and mark is None and not self._syntax.may_open(rest)):
            self._state = "reasoning" if self._syntax.begins_inside else "answer"

    def _read_reasoning(self) -> Iterator[Piece]:
        start, mark = first_mark(self._buffer, self._syntax.closings)
        text, self._buffer = self._buffer[:start], self._buffer[start:]
        yield from self._reasoning(text)
        if mark is not None:
            self._buffer, self._state = self._buffer[len(mark) :].lstrip(), "answer"
            self._space, self._has_answer = "", bool(self._buffer)
            self._has_reasoning = True

    def _reasoning(self, text: str) -> Iterator[Reasoning]:
        whole = self._space + text
        if not self._has_reasoning:
            whole = whole.lstrip()
        kept = whole.rstrip()
        self._space = whole[len(kept) :]
        if kept:
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
