"""Incremental parser of gpt-oss's answers (OpenAI's harmony format).

An answer is a sequence of messages: `<|channel|>NAME to=RECIPIENT <|constrain|>json<|message|>BODY`
with an end mark. Channel `analysis` is reasoning, `final` the answer, and a message to
`functions.NAME` a call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal

from cluster.api.openai.parsers.pieces import (
    CallArguments,
    CallStart,
    Content,
    Piece,
    Reasoning,
    first_mark,
)
from cluster.api.openai.parsers.tool_format import Tool

CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_START = "<|start|>"
ASSISTANT = f"{_START}assistant"
"""The beginning of the answer, at the end of the prompt."""
_RECIPIENT = re.compile(r"to=functions\.([a-zA-Z0-9_.-]+)")

_Kind = Literal["header", "content", "reasoning", "call", "between"]


class HarmonyParser:
    """Parser of one answer. A text without a header, as a grammar produces it, is content.

    num_reasoning_chars: characters up to the end of the last reasoning, 0 before it.
    """

    def __init__(self, tools: Sequence[Tool] = (), begun: str = "") -> None:
        """tools: the functions that may be called. begun: text that the answer continues."""
        self._names = frozenset(each.name for each in tools)
        self._kind: _Kind = "content"
        self._buffer = ""
        self._num_chars = 0  # that were fed
        self.num_calls = 0
        list(self.feed(begun))
        self._num_chars = self.num_reasoning_chars = 0

    @property
    def is_reasoning(self) -> bool:
        """Return whether the text so far ends in reasoning."""
        return self._kind == "reasoning"

    def feed(self, text: str) -> Iterator[Piece]:
        """Add `text` and yield the pieces that are complete."""
        self._buffer += text
        self._num_chars += len(text)
        while True:
            before = self._kind, len(self._buffer)
            yield from self._read_header() if self._kind == "header" else self._read_body()
            if (self._kind, len(self._buffer)) == before:
                return

    def finish(self) -> Iterator[Piece]:
        """Yield the rest at the end of the answer; an incomplete header is dropped."""
        rest, self._buffer = self._buffer, ""
        if self._kind != "header":
            yield from self._piece(rest)

    def _read_header(self) -> Iterator[Piece]:
        start, mark = first_mark(self._buffer, (MESSAGE,))
        if mark is None:
            return
        header = self._take(start)
        self._take(len(mark))
        recipient = _RECIPIENT.search(header)
        channel = header.rpartition(CHANNEL)[2].split()
        if recipient is not None and recipient[1] in self._names:
            self._kind = "call"
            self.num_calls += 1
            yield CallStart(self.num_calls - 1, recipient[1])
        elif channel[:1] == ["analysis"]:
            self._kind = "reasoning"
        else:
            self._kind = "content"

    def _read_body(self) -> Iterator[Piece]:
        start, mark = first_mark(self._buffer, (*_ENDS, _START, CHANNEL))
        yield from self._piece(self._take(start))
        if mark is not None:
            self._take(len(mark))
            if self.is_reasoning:
                self.num_reasoning_chars = self._num_chars - len(self._buffer)
            self._kind = "between" if mark in _ENDS else "header"

    def _piece(self, text: str) -> Iterator[Piece]:
        if not text:
            return
        match self._kind:
            case "reasoning":
                yield Reasoning(text)
            case "call":
                yield CallArguments(self.num_calls - 1, text)
            case "content":
                yield Content(text)

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken
