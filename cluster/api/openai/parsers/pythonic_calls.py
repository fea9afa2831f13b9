"""Incremental parser of tool calls in Python's syntax, as Llama 4, Llama 3.2 and LFM2 write them.

The answer is a list of calls with keyword arguments, `[weather(city="Ulm"), time()]`, perhaps
between marks, before which a text may stand. Arguments are literals. Nothing is evaluated.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from io import StringIO
from tokenize import NAME, TokenError, generate_tokens, untokenize
from typing import Any, Literal

from cluster.api.openai.parsers.literals import literal
from cluster.api.openai.parsers.pieces import (
    CallArguments,
    CallStart,
    ContentWriter,
    Piece,
    StateParser,
    first_mark,
    json_text,
)
from cluster.api.openai.parsers.tool_format import Tool

MARKS = {
    "llama4_pythonic": ("<|python_start|>", "<|python_end|>"),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
}
"""The marks around a list, by family."""
_CLOSERS = {"(": ")", "[": "]", "{": "}"}

_TEXT = re.compile(r"""(["'])(?:\\.|(?!\1)[^\\])*\1""", re.DOTALL)
"""A text in quotes, in which models also write line breaks, unlike Python."""

_ESCAPE_OR_BREAK = re.compile(r"\\(?:\r\n|.)|[\r\n]", re.DOTALL)
_ESCAPES = {"\n": r"\n", "\r": r"\r"}

_BETWEEN = " \t\r\n,"
_IN_NAME = "_.-"
"""Characters in the names of functions besides letters and digits; Python has no such names."""

_State = Literal["start", "list", "end", "text"]


class PythonicCallParser(StateParser[_State]):
    """Parser of one answer. What is no call of a known function becomes content.

    States: `start` where a list may begin; `list`; `end` after it; `text`.
    """

    def __init__(self, marks: tuple[str, str], tools: Sequence[Tool]) -> None:
        """Parse lists between `marks`. tools: the functions that may be called."""
        super().__init__("start")
        self._opening, self._closing = marks
        self._names = frozenset(each.name for each in tools)
        self._held = ""  # marks and separators, which are content unless a call follows
        self._scan = _CallScan()
        self._has_call = False  # in the current list
        self._content = ContentWriter()

    def finish(self, *, is_cut: bool = False) -> Iterator[Piece]:
        """Yield the rest at the end of the answer, without the beginning of a call that is cut."""
        rest, self._buffer = self._buffer, ""
        is_end = self._has_call and self._state == "end" and self._closing.startswith(rest)
        if is_end or (is_cut and self._is_begun(rest)):
            self._content.drop_space()
        else:
            rest = rest.lstrip(_BETWEEN) if self._has_call else self._held + rest
            yield from self._content.write(rest)
        yield from self._content.finish(keeps_space=not self.num_calls)

    def _is_begun(self, start: str) -> bool:
        """Return whether a text that is cut may be the beginning of a mark or of a known call."""
        if self._state != "list":
            is_half_mark = len(start) > 1 and any(
                each.startswith(start) for each in (self._opening, self._closing)
            )
            return is_half_mark or (self._state == "start" and self._opening in self._held)
        name = start.lstrip(_BETWEEN).partition("(")
        known = (each == name[0] if name[1] else each.startswith(name[0]) for each in self._names)
        return any(known)

    def _read_start(self) -> Iterator[Piece]:
        """Parse up to the first call of a list, or find that there is none."""
        rest = self._buffer.lstrip()
        self._hold(len(self._buffer) - len(rest))
        if rest.startswith("["):
            self._hold(1)
            self._state, self._scan, self._has_call = "list", _CallScan(), False
        elif rest.startswith(self._opening):
            self._hold(len(self._opening))
        elif rest and not self._opening.startswith(rest):
            yield from self._reject(0)

    def _read_list(self) -> Iterator[Piece]:
        call = self._scan.next_call(self._buffer)
        if call is not None:
            text = self._take(self._scan.place)
            self._scan.place = 0
            yield from self._read_call(text, call)
        elif self._scan.is_broken:
            yield from self._reject(0)
        elif self._scan.is_closed:
            self._hold(self._scan.place)
            self._state = "end"

    def _read_call(self, text: str, call: str) -> Iterator[Piece]:
        """Yield a call. text: the call with what separates it from the one before."""
        parsed = _parsed(call)
        if parsed is None or parsed[0] not in self._names:
            self._state = "text" if parsed is None else "list"
            text = text.lstrip(_BETWEEN) if self._has_call else self._held + text
            self._held = ""
            yield from self._content.write(text)
        else:
            self._held, self._has_call = "", True
            self._content.drop_space()
            self.num_calls += 1
            yield CallStart(self.num_calls - 1, parsed[0])
            yield CallArguments(self.num_calls - 1, json_text(parsed[1]))

    def _read_end(self) -> Iterator[Piece]:
        """Parse the closing mark of a list, or the beginning of the next."""
        rest = self._buffer.lstrip()
        self._hold(len(self._buffer) - len(rest))
        if self._has_call and rest.startswith(self._closing):
            self._hold(len(self._closing))
        elif rest.startswith(self._opening) or (self._has_call and rest.startswith("[")):
            self._state = "start"
        elif rest and not any(each.startswith(rest) for each in (self._opening, self._closing)):
            yield from self._reject(0)

    def _reject(self, count: int) -> Iterator[Piece]:
        """Continue with text; what was held is content, and so are the next `count` characters."""
        held, self._held, self._state = "" if self._has_call else self._held, "", "text"
        yield from self._content.write(held + self._take(count))

    def _read_text(self) -> Iterator[Piece]:
        start, mark = first_mark(self._buffer, (self._opening,))
        yield from self._content.write(self._take(start))
        if mark is not None:
            self._state, self._has_call = "start", False

    def _hold(self, count: int) -> None:
        self._held += self._take(count)


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
        elif self._begin is None and (char.isalnum() or char in _IN_NAME):
            self._begin = self.place - 1
        elif not self._open:
            is_name = self._begin is not None and (char.isalnum() or char in _IN_NAME)
            is_between = self._begin is None and char in f"{_BETWEEN}]"
            self.is_broken = not (is_name or is_between)
            self.is_closed = is_between and char == "]"
        return False


def _parsed(text: str) -> tuple[str, dict[str, Any]] | None:
    """Return name and arguments of a call of literals; None for anything else."""
    name, _, rest = text.partition("(")
    rest = _TEXT.sub(_with_escaped_breaks, rest)
    try:
        call, prefix = _parsed_call(f"call({rest}")
        if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
            return None
        arguments = {
            str(each.arg).removeprefix(prefix): literal(each.value) for each in call.keywords
        }
        json.dumps(arguments, allow_nan=False)
        return name, arguments
    except (SyntaxError, TokenError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _with_escaped_breaks(text: re.Match[str]) -> str:
    """Return a text in quotes with escapes for its line breaks, except after a backslash."""
    return _ESCAPE_OR_BREAK.sub(lambda found: _ESCAPES.get(found[0], found[0]), text[0])


def _parsed_call(call: str) -> tuple[ast.expr, str]:
    """Return a call, and the prefix that the names of its arguments have got for Python.

    It is "_" where some are Python's keywords, else empty: names are seldom such, and this is slow.
    """
    try:
        return ast.parse(call, mode="eval").body, ""
    except SyntaxError:
        tokens = [(each.type, each.string) for each in generate_tokens(StringIO(call).readline)]
        following = [text for _, text in tokens[1:]] + [""]
        prefixed = untokenize(
            (kind, f"_{text}" if kind == NAME and after == "=" else text)
            for (kind, text), after in zip(tokens, following, strict=True)
        )
        return ast.parse(prefixed, mode="eval").body, "_"
