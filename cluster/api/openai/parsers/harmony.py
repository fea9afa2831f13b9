"""Incremental parser of gpt-oss's answers (OpenAI's harmony format).

An answer is a sequence of messages: `<|channel|>NAME to=RECIPIENT <|constrain|>json<|message|>BODY`
with an end mark. Channel `analysis` is reasoning, `final` the answer, and a message to
`functions.NAME` a call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Literal

from cluster.api.openai.parsers.pieces import (
    CallArguments,
    CallStart,
    Content,
    Piece,
    Reasoning,
    StateParser,
    first_mark,
)
from cluster.api.openai.parsers.tool_format import Tool

CHANNEL, MESSAGE, _CONSTRAIN = "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_START = "<|start|>"
ASSISTANT = f"{_START}assistant"
"""The beginning of the answer, at the end of the prompt."""

_RECIPIENT = re.compile(r"to=(?:functions\.)?([a-zA-Z0-9_.-]+)")
_BEGUN_ROLES = tuple(accumulate("assistant"))[::-1]  # the longest first
_BEGUN_RECIPIENT = re.compile(r"to=[\w.-]*")
_WORD = re.compile(r"\w+")
_ADDRESSEE = re.compile(r"to=\S*")
_BEFORE_ADDRESSEE = re.compile(r"(?<=\w)(?=to=)")
_HEADER = (
    _WORD,
    _ADDRESSEE,
    re.compile(re.escape(CHANNEL) + r"\w*"),
    _ADDRESSEE,
    re.compile(rf"(?:{re.escape(_CONSTRAIN)})?(?:json|code)?"),
)
"""The words of a header, each of which may be left out."""
_MAX_HEADER_CHARS = 1_000

_State = Literal["start", "header", "content", "reasoning", "call", "between"]


class HarmonyParser(StateParser[_State]):
    """Parser of one answer. A text without a header, as a grammar produces it, is content.

    num_reasoning_chars: characters up to the end of the last reasoning, 0 before it.
    """

    def __init__(self, tools: Sequence[Tool] = (), begun: str = "") -> None:
        """tools: the functions that may be called. begun: text that the answer continues."""
        super().__init__("start")
        self._names = frozenset(each.name for each in tools)
        self._has_arguments = False  # in the current call
        self._num_taken = self.num_reasoning_chars = 0
        list(self.feed(begun))
        self._num_taken, self.num_reasoning_chars = -len(self._buffer), 0

    @property
    def is_reasoning(self) -> bool:
        """Return whether the text so far ends in reasoning."""
        return self._state == "reasoning"

    def finish(self, *, is_cut: bool = False) -> Iterator[Piece]:
        """Yield the rest at the end of the answer; a header that is not complete is dropped."""
        rest, self._buffer = self._buffer, ""
        is_header = self._state == "header" and _may_be_header(rest)
        is_role = self._state == "between" and _may_be_role(rest)
        if is_header or is_role or (is_cut and len(rest) > 1):
            return
        yield from self._piece(rest)
        if not is_cut:
            yield from self._end_call()

    def _read(self) -> Iterator[Piece]:
        match self._state:
            case "start" | "between":
                self._read_role()
            case "header":
                yield from self._read_header()
            case _:
                yield from self._read_body()

    def _read_role(self) -> None:
        """Find whether a header begins here without its opening mark; else it is content."""
        start, mark = first_mark(self._buffer, (CHANNEL, MESSAGE, _START, *_ENDS))
        text = self._buffer[:start]
        may_be_header = len(text) < _MAX_HEADER_CHARS and _may_be_role(text)
        if may_be_header and mark is None:
            return
        is_header = may_be_header and (mark == CHANNEL or (mark == MESSAGE and "to=" in text))
        if self._state == "between":
            self._take(len(self._buffer) - len(self._buffer.lstrip()))
        self._state = "header" if is_header else "content"

    def _read_header(self) -> Iterator[Piece]:
        start, mark = first_mark(self._buffer, (MESSAGE,))
        if mark is None:
            if len(self._buffer) > _MAX_HEADER_CHARS:
                self._state = "content"
            return
        header = self._take(start)
        self._take(len(mark))
        recipient = _RECIPIENT.search(header)
        channel = header.rpartition(CHANNEL)[2].split()
        if recipient is not None and recipient[1] in self._names:
            self._state, self._has_arguments = "call", False
            self.num_calls += 1
            yield CallStart(self.num_calls - 1, recipient[1])
        elif channel[:1] == ["analysis"]:
            self._state = "reasoning"
        else:
            self._state = "content"

    def _read_body(self) -> Iterator[Piece]:
        start, mark = first_mark(self._buffer, (*_ENDS, _START, CHANNEL))
        yield from self._piece(self._take(start))
        if mark is not None:
            self._take(len(mark))
            if self.is_reasoning:
                self.num_reasoning_chars = self._num_taken
            yield from self._end_call()
            self._state = "between" if mark in _ENDS else "header"

    def _take(self, count: int) -> str:
        self._num_taken += count
        return super()._take(count)

    def _end_call(self) -> Iterator[Piece]:
        """Yield the arguments of a call whose message is empty."""
        if self._state == "call" and not self._has_arguments:
            self._has_arguments = True
            yield CallArguments(self.num_calls - 1, "{}")

    def _piece(self, text: str) -> Iterator[Piece]:
        if self._state == "call" and not self._has_arguments:
            text = text.lstrip()
        if not text:
            return
        match self._state:
            case "reasoning":
                yield Reasoning(text)
            case "call":
                self._has_arguments = True
                yield CallArguments(self.num_calls - 1, text)
            case _:
                yield Content(text)


def _may_be_header(text: str) -> bool:
    """Return whether a text is a header up to its last mark, or the beginning of one."""
    for mark in (CHANNEL, _CONSTRAIN):
        text = text.replace(mark, f" {mark}")
    words = [each for word in text.split() for each in _BEFORE_ADDRESSEE.split(word, maxsplit=1)]
    parts = iter(_HEADER)
    return all(any(part.fullmatch(word) for part in parts) for word in words)


def _may_be_role(text: str) -> bool:
    """Return whether a text is a header up to its channel, or the beginning of one.

    The prompt may end with the role.
    """
    text = text.lstrip()
    role = next(filter(text.startswith, _BEGUN_ROLES), "")
    words = text.removeprefix(role).split()
    if words and "to".startswith(words[0]):
        return len(words) == 1 and text.endswith(words[0])
    is_named = not words or _BEGUN_RECIPIENT.fullmatch(words[0]) is not None
    return is_named and len(words) <= 2 and all(map(_WORD.fullmatch, words[1:]))
