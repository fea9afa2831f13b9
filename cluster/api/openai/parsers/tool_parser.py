"""Incremental parser of tool calls that are JSON objects: complete names, arguments in pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import Any, Literal

from cluster.api.openai.parsers.pieces import (
    CallArguments,
    CallStart,
    Content,
    Piece,
    escape_lone_surrogates,
    json_text,
)
from cluster.api.openai.parsers.tool_format import ToolFormat

_ARGUMENTS_KEYS = ("arguments", "parameters")
_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_MAX_HEAD_CHARS = 1_000
_PYTHON_TAG = "<|python_tag|>"


_State = Literal["text", "call", "arguments", "after"]


class JsonSpan:
    """Scanner of one object, array or string. It counts brackets and does not validate."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self.is_complete = False

    def feed(self, text: str) -> int:
        """Scan `text` and return how many of its characters belong to the value."""
        for index, char in enumerate(text):
            if self.is_complete:
                return index
            self._step(char)
        return len(text)

    def _step(self, char: str) -> None:
        if self._in_string:
            self._step_in_string(char)
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.is_complete = self._depth <= 0

    def _step_in_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False
            self.is_complete = self._depth == 0


class ToolCallParser:
    """Parser of one answer. The joined pieces do not depend on how the text is split.

    Text that looks like a call of an unknown function, or is malformed, becomes content.
    Whitespace before a call is dropped.
    """

    def __init__(self, form: ToolFormat, names: Collection[str]) -> None:
        """Make a parser; `names` are those of the request's functions."""
        self._form = form
        self._names = frozenset(names)
        self._state: _State = "text" if form.opening else "after"
        self._buffer = ""
        self._object = JsonSpan()  # the current call
        self._num_scanned = 0  # characters of the buffer that were fed to it
        self._arguments = JsonSpan()
        self.num_calls = 0

    def feed(self, text: str) -> Iterator[Piece]:
        """Add `text` and yield the pieces that are complete."""
        self._buffer += text
        while True:
            state, length = self._state, len(self._buffer)
            yield from self._read()
            if (self._state, len(self._buffer)) == (state, length):
                return

    def finish(self) -> Iterator[Piece]:
        """Yield the rest at the end of the answer."""
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
            self._start_call()
            return
        withheld = _num_withheld(self._buffer, mark) if mark else 0
        yield from _content(self._take(len(self._buffer) - withheld))

    def _start_call(self) -> None:
        self._state, self._object, self._num_scanned = "call", JsonSpan(), 0

    def _read_call(self) -> Iterator[Piece]:
        """Parse a call up to its arguments, which stream, or a complete call in another order."""
        head = _HEAD.match(self._buffer[:_MAX_HEAD_CHARS])
        if head is not None and self._is_call_of(json_or_none(head[1])):
            self._take(head.end())
            self._arguments, self._state = JsonSpan(), "arguments"
            yield self._next_call(json.loads(head[1]))
            return
        start = len(self._buffer) - len(self._buffer.lstrip())
        self._num_scanned = max(self._num_scanned, start)
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
        start = self._next_call(str(name))
        yield start
        yield CallArguments(start.index, arguments_text(call))

    def _read_arguments(self) -> Iterator[Piece]:
        length = self._arguments.feed(self._buffer)
        if length:
            yield CallArguments(self.num_calls - 1, self._take(length))
        if self._arguments.is_complete:
            self._state = "after"

    def _read_after(self) -> Iterator[Piece]:
        """Parse the text between calls, or before the first call of a format without marks."""
        if self._form.opening:
            yield from self._read_closing()
            return
        rest = self._buffer.lstrip(" \t\r\n;}" if self.num_calls else " \t\r\n")
        rest = rest.removeprefix(_PYTHON_TAG).lstrip(" \t\r\n")
        if rest.startswith("{"):
            self._buffer = rest
            self._start_call()
        elif rest and not _PYTHON_TAG.startswith(rest):
            self._buffer = rest if self.num_calls else self._buffer
            self._state = "text"

    def _read_closing(self) -> Iterator[Piece]:
        """Parse up to the closing mark of a call, or the opening mark of the next."""
        end, start = (self._buffer.find(mark) for mark in (self._form.closing, self._form.opening))
        if end >= 0 and not 0 <= start < end:
            self._take(end + len(self._form.closing))
        elif start >= 0:
            yield from _content(self._unclosed(self._take(start)).rstrip())
        if max(end, start) >= 0:
            self._state = "text"

    def _unclosed(self, text: str) -> str:
        """Return the content of a text after a call without a closing mark."""
        rest = text.lstrip(" \t\r\n;}")
        return "" if self._form.closing.startswith(rest) or not self._form.closing else rest

    def _is_call_of(self, name: Any) -> bool:
        return isinstance(name, str) and name in self._names

    def _next_call(self, name: str) -> CallStart:
        self.num_calls += 1
        return CallStart(self.num_calls - 1, name)

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken


def json_or_none(text: str) -> Any:
    """Parse JSON; return None if it is malformed."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def arguments_text(call: dict[str, Any]) -> str:
    """Return the arguments as JSON text; some models write them as a JSON string."""
    arguments: Any = next((call[key] for key in _ARGUMENTS_KEYS if key in call), {})
    if isinstance(arguments, str):
        return escape_lone_surrogates(arguments)
    return json_text(arguments if arguments is not None else {})


def _content(text: str) -> Iterator[Content]:
    if text:
        yield Content(text)


def _num_withheld(text: str, mark: str) -> int:
    """Count the last characters that may be whitespace before a mark and the start of the mark."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    num_of_mark = next((length for length in lengths if text.endswith(mark[:length])), 0)
    before = text[: len(text) - num_of_mark]
    return num_of_mark + len(before) - len(before.rstrip())
