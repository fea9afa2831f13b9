"""The pieces that an answer is parsed into, and helpers that all parsers of answers share.

Parsers are incremental. The joined pieces do not depend on how the text is split.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

State = TypeVar("State", bound=str)

_CHUNK_CHARS = 4_096
"""Text that is added at once: each step of a parser copies what is not parsed yet."""


@dataclass(frozen=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of the model's reasoning before its answer."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """The start of a call; its arguments follow.

    index: among the calls of the answer. call_id: the id that the model gave it; empty for none.
    """

    index: int
    name: str
    call_id: str = ""


@dataclass(frozen=True)
class CallArguments:
    """A piece of the arguments of a call, as JSON text."""

    index: int
    text: str


Piece = Content | Reasoning | CallStart | CallArguments


class AnswerParser(Protocol):
    """Parser of one answer."""

    @property
    def num_calls(self) -> int:
        """Calls that were parsed so far."""

    def feed(self, text: str) -> Iterator[Piece]:
        """Add `text` and yield the pieces that are complete."""

    def finish(self, *, is_cut: bool = False) -> Iterator[Piece]:
        """Yield the rest at the end of the answer.

        is_cut: whether a limit of length has ended it. The beginning of a call, or of its mark, is
        no content then.
        """


class PlainParser:
    """Parser of an answer that is content alone."""

    num_calls = 0

    def feed(self, text: str) -> Iterator[Piece]:
        """Yield the text."""
        if text:
            yield Content(text)

    def finish(self, *, is_cut: bool = False) -> Iterator[Piece]:
        """Yield nothing: all was yielded."""
        yield from ()


class StateParser(Generic[State]):
    """Parser of one answer by states, each of which reads from the text that is not parsed yet."""

    def __init__(self, state: State) -> None:
        """Begin in a state, with no text."""
        self._state = state
        self._buffer = ""
        self.num_calls = 0

    def feed(self, text: str) -> Iterator[Piece]:
        """Add `text` and yield the pieces that are complete."""
        for start in range(0, len(text), _CHUNK_CHARS):
            self._buffer += text[start : start + _CHUNK_CHARS]
            before = None
            while before != (before := (self._state, len(self._buffer))):
                yield from self._read()

    def _read(self) -> Iterator[Piece]:
        """Read what is complete in the present state; change nothing if more text is needed.

        The method of a state has its name: `_read_text` reads in the state `text`.
        """
        read: Callable[[], Iterator[Piece]] = getattr(self, f"_read_{self._state}")
        return read()

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken


def json_text(value: Any) -> str:
    """Serialize to JSON that can be sent as UTF-8: lone surrogates are escaped.

    A model can write half of a character in a JSON string, as the first of two escapes.
    """
    return escape_lone_surrogates(json.dumps(value, ensure_ascii=False))


def escape_lone_surrogates(text: str) -> str:
    """Return JSON text with lone surrogates as the escapes of JSON."""
    return text.encode(errors="backslashreplace").decode()


class Mark(NamedTuple):
    """The first of several marks in a text: its place, and which one; None where there is none."""

    start: int
    text: str | None


def first_mark(text: str, marks: Iterable[str]) -> Mark:
    """Find the first mark; where there is none, `start` is the end of what cannot begin one.

    No mark may be the beginning of another.
    """
    known = tuple(marks)
    if (found := _any_of(known).search(text)) is not None:
        return Mark(found.start(), found[0])
    return Mark(len(text) - max(_num_begun(text, mark) for mark in known), None)


@lru_cache
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)))


def _num_begun(text: str, mark: str) -> int:
    """Count the last characters of a text that may begin a mark."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(mark[:length])), 0)


class TrailingSpace:
    """Whitespace at the end of a text, withheld until more text follows. Linear in its length."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def withhold(self, text: str) -> str:
        """Return what was withheld with `text`, without the whitespace at its end."""
        kept = text.rstrip()
        shown = self.take() + kept if kept else ""
        self._parts.append(text[len(kept) :])
        return shown

    def take(self) -> str:
        """Return what is withheld, which ends with this."""
        taken, self._parts = "".join(self._parts), []
        return taken


class ContentWriter:
    """Content around marks: whitespace is withheld until it is known not to precede a mark."""

    def __init__(self) -> None:
        self._space = TrailingSpace()

    def write(self, text: str) -> Iterator[Content]:
        """Yield the content without its trailing whitespace, which the next content follows."""
        if kept := self._space.withhold(text):
            yield Content(kept)

    def drop_space(self) -> None:
        """Drop the whitespace before a mark."""
        self._space.take()

    def finish(self, *, keeps_space: bool) -> Iterator[Content]:
        """Yield whitespace at the end of an answer, where it is part of it."""
        if (space := self._space.take()) and keeps_space:
            yield Content(space)
