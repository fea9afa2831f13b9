"""Incremental parser of tool calls in Python's syntax, as Llama 4 and Llama 3.2 write them.

The answer is a list of calls with keyword arguments, `[weather(city="Ulm"), time()]`, perhaps
between `<|python_start|>` and `<|python_end|>`. Arguments are literals. Nothing is evaluated.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from cluster.api.openai.parsers.pieces import CallArguments, CallStart, Content, Piece, json_text
from cluster.api.openai.parsers.tool_format import Tool

_START, _END = "<|python_start|>", "<|python_end|>"
_CLOSERS = {"(": ")", "[": "]", "{": "}"}

_State = Literal["start", "list", "text"]


class PythonicCallParser:
    """Parser of one answer. A list with anything but calls of known functions becomes content."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        """tools: the functions that may be called."""
        self._names = frozenset(each.name for each in tools)
        self._state: _State = "start"
        self._text = ""  # all of it, until it is known to be content
        self._num_read = 0  # characters of it in complete calls, with what is around them
        self._scan = _CallScan()
        self.num_calls = 0

    def feed(self, text: str) -> Iterator[Piece]:
        """Add `text` and yield the calls that are complete, or the content."""
        if self._state == "text":
            yield from _content(text)
            return
        self._text += text
        self._open()
        yield from self._read_calls()
        yield from self._read_text()

    def finish(self) -> Iterator[Piece]:
        """Yield the rest at the end of the answer, as content."""
        if self._state == "text":
            return
        rest = self._text[self._num_read :]
        closing = rest.strip().removeprefix("]").strip()
        if not self.num_calls or not _END.startswith(closing):
            yield from _content(rest)

    def _open(self) -> None:
        """Skip to the first call, or find that there is none."""
        if self._state != "start":
            return
        rest = self._text.lstrip()
        if _START.startswith(rest):  # of the mark there may be more
            return
        bare = rest.removeprefix(_START).lstrip()
        if not bare:
            return
        self._state = "list" if bare[0] == "[" else "text"
        if self._state == "list":
            self._scan.place = len(self._text) - len(bare) + 1

    def _read_text(self) -> Iterator[Piece]:
        if self._state == "text":
            yield from _content(self._text[self._num_read :])
            self._text = ""

    def _read_calls(self) -> Iterator[Piece]:
        if self._state != "list":
            return
        while (call := self._scan.next_call(self._text)) is not None:
            parsed = _parsed(call)
            if parsed is None or parsed[0] not in self._names:
                self._state = "text"
                return
            name, arguments = parsed
            self._num_read = self._scan.place
            start = CallStart(self.num_calls, name)
            self.num_calls += 1
            yield start
            yield CallArguments(start.index, json_text(arguments))
        if self._scan.is_broken:
            self._state = "text"


class _CallScan:
    """Finds the calls of a list by its brackets and quotes. place: what is scanned."""

    def __init__(self) -> None:
        self.place = 0
        self.is_broken = False  # something else than a call begins here
        self.is_closed = False  # the list has ended
        self._begin: int | None = None
        self._open: list[str] = []  # the closing brackets that are due
        self._quote = ""

    def next_call(self, text: str) -> str | None:
        """Return the next call once it is complete; None while it is not."""
        while self.place < len(text) and not (self.is_broken or self.is_closed):
            char = text[self.place]
            if self._quote and char == "\\":
                if self.place + 1 == len(text):
                    return None
                self.place += 2
                continue
            self.place += 1
            if self._step(char):
                begin, self._begin = self._begin, None
                return text[begin : self.place]
        return None

    def _step(self, char: str) -> bool:
        """Take a character; return whether it completes a call."""
        if self._quote:
            self._quote = "" if char == self._quote else self._quote
        elif char in "\"'" and self._open:
            self._quote = char
        elif char in _CLOSERS and self._begin is not None:
            self._open.append(_CLOSERS[char])
        elif self._open and char == self._open[-1]:
            self._open.pop()
            return not self._open
        elif self._begin is None and (char.isalpha() or char == "_"):
            self._begin = self.place - 1
        elif not self._open:
            is_name = self._begin is not None and (char.isalnum() or char in "_.")
            is_between = self._begin is None and char in " \t\r\n,]"
            self.is_broken = not (is_name or is_between)
            self.is_closed = is_between and char == "]"
        return False


def _parsed(text: str) -> tuple[str, dict[str, Any]] | None:
    """Return name and arguments of a call of literals; None for anything else."""
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
            return None
        arguments = {str(each.arg): _literal(each.value) for each in call.keywords}
        json.dumps(arguments)
        return ast.unparse(call.func), arguments
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _literal(value: ast.expr) -> Any:
    """Return a literal; also of JSON's constants, which models mix in."""
    constants = {"true": True, "false": False, "null": None}
    if isinstance(value, ast.Name) and value.id in constants:
        return constants[value.id]
    return ast.literal_eval(value)


def _content(text: str) -> Iterator[Content]:
    if text:
        yield Content(text)
