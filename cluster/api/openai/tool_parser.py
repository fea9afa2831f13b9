"""Takes tool calls out of a text as it comes: names whole, arguments as they are written."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from cluster.api.openai.json_span import JsonSpan
from cluster.api.openai.tool_format import ToolFormat

_ARGUMENTS_KEYS = ("arguments", "parameters")
_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_MAX_HEAD_CHARS = 1_000
_PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class Content:
    """Text that is no call."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """A call of a function; its arguments follow. index: among the calls of the answer."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """What is added to the arguments of a call: a piece of JSON text."""

    index: int
    text: str


Piece = Content | CallBegun | CallArguments

_State = Literal["text", "call", "arguments", "after"]


class ToolCallParser:
    """Reads one answer. Joined, the pieces are the same however the text is cut.

    What looks like a call and is none is given back as content: a call names a function that was
    offered. Whitespace before a call is dropped.
    """

    def __init__(self, form: ToolFormat, names: Collection[str]) -> None:
        """`names`: of the functions that the request offers."""
        self._form = form
        self._names = frozenset(names)
        self._state: _State = "text" if form.opening else "after"
        self._buffer = ""
        self._object = JsonSpan()  # of the call that is read
        self._num_scanned = 0  # characters of the buffer that it has seen
        self._arguments = JsonSpan()
        self.num_calls = 0

    def feed(self, text: str) -> Iterator[Piece]:
        """What is certain once `text` has come."""
        self._buffer += text
        while True:
            state, length = self._state, len(self._buffer)
            yield from self._read()
            if (self._state, len(self._buffer)) == (state, length):
                return

    def finish(self) -> Iterator[Piece]:
        """What is left when nothing more comes."""
        rest, self._buffer = self._buffer, ""
        match self._state:
            case "call":
                rest = self._form.opening + rest
            case "arguments":
                rest = ""
            case "after" if self.num_calls:
                rest = self._unclosed(rest)
        if rest.strip() or not self.num_calls:
            yield from _content(rest)

    def _read(self) -> Iterator[Piece]:
        match self._state:
            case "text":
                yield from self._read_text()
            case "call":
                yield from self._read_call()
            case "arguments":
                yield from self._read_arguments()
            case "after":
                yield from self._read_after()

    def _read_text(self) -> Iterator[Piece]:
        mark = self._form.opening
        start = self._buffer.find(mark) if mark else -1
        if start >= 0:
            yield from _content(self._take(start).rstrip())
            self._take(len(mark))
            self._begin_call()
            return
        held = _num_held(self._buffer, mark) if mark else 0
        yield from _content(self._take(len(self._buffer) - held))

    def _begin_call(self) -> None:
        self._state, self._object, self._num_scanned = "call", JsonSpan(), 0

    def _read_call(self) -> Iterator[Piece]:
        """A call up to its arguments, which stream; or a whole one that is written otherwise."""
        head = _HEAD.match(self._buffer[:_MAX_HEAD_CHARS])
        if head is not None and self._is_call_of(json_or_none(head[1])):
            self._take(head.end())
            self._arguments, self._state = JsonSpan(), "arguments"
            yield self._next_call(json.loads(head[1]))
            return
        begin = len(self._buffer) - len(self._buffer.lstrip())
        self._num_scanned = max(self._num_scanned, begin)
        self._num_scanned += self._object.feed(self._buffer[self._num_scanned :])
        if self._object.is_complete:
            yield from self._read_whole_call(self._take(self._num_scanned))

    def _read_whole_call(self, text: str) -> Iterator[Piece]:
        call = json_or_none(text)
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(call, dict) or not self._is_call_of(name):
            self._state = "text"
            yield from _content(self._form.opening + text)
            return
        self._state = "after"
        begun = self._next_call(str(name))
        yield begun
        yield CallArguments(begun.index, _arguments_text(call))

    def _read_arguments(self) -> Iterator[Piece]:
        length = self._arguments.feed(self._buffer)
        if length:
            yield CallArguments(self.num_calls - 1, self._take(length))
        if self._arguments.is_complete:
            self._state = "after"

    def _read_after(self) -> Iterator[Piece]:
        """Between calls, or where there are no marks before the first."""
        if self._form.opening:
            yield from self._read_closing()
            return
        rest = self._buffer.lstrip(" \t\r\n;}" if self.num_calls else " \t\r\n")
        rest = rest.removeprefix(_PYTHON_TAG).lstrip(" \t\r\n")
        if rest.startswith("{"):
            self._buffer = rest
            self._begin_call()
        elif rest and not _PYTHON_TAG.startswith(rest):
            self._buffer = rest if self.num_calls else self._buffer
            self._state = "text"

    def _read_closing(self) -> Iterator[Piece]:
        """Up to the mark that ends a call, or the one that begins the next."""
        end, start = (self._buffer.find(mark) for mark in (self._form.closing, self._form.opening))
        if end >= 0 and not 0 <= start < end:
            self._take(end + len(self._form.closing))
        elif start >= 0:
            yield from _content(self._unclosed(self._take(start)).rstrip())
        if max(end, start) >= 0:
            self._state = "text"

    def _unclosed(self, text: str) -> str:
        """What a text behind a call says, if the mark that ends the call is missing."""
        said = text.lstrip(" \t\r\n;}")
        return "" if self._form.closing.startswith(said) or not self._form.closing else said

    def _is_call_of(self, name: Any) -> bool:
        return isinstance(name, str) and name in self._names

    def _next_call(self, name: str) -> CallBegun:
        self.num_calls += 1
        return CallBegun(self.num_calls - 1, name)

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken


def json_or_none(text: str) -> Any:
    """The value; None where it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _arguments_text(call: dict[str, Any]) -> str:
    """The arguments as JSON text; some models write that text as a string."""
    arguments: Any = next((call[key] for key in _ARGUMENTS_KEYS if key in call), {})
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments if arguments is not None else {}, ensure_ascii=False)


def _content(text: str) -> Iterator[Content]:
    if text:
        yield Content(text)


def _num_held(text: str, mark: str) -> int:
    """How many characters at the end may be whitespace before a mark, and its beginning."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    begun = next((length for length in lengths if text.endswith(mark[:length])), 0)
    before = text[: len(text) - begun]
    return begun + len(before) - len(before.rstrip())
