"""Incremental parser of calls whose arguments are JSON: complete names, arguments in pieces.

Calls are found wherever they are unambiguous, also with one mark too many or too few. Text that is
no call becomes content, as do calls of unknown functions. Only marks, separators and whitespace
around calls are dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import Any, Literal

from cluster.api.openai.parsers.call_syntax import CallSyntax
from cluster.api.openai.parsers.json_span import (
    ARGUMENTS_KEYS,
    JsonSpan,
    arguments_text,
    called_name,
    json_or_none,
)
from cluster.api.openai.parsers.pieces import (
    CallArguments,
    CallStart,
    ContentWriter,
    Piece,
    StateParser,
    first_mark,
)

SPACE = " \t\r\n"
_HEAD = re.compile(
    r'\{\s*(?:"(?:type|tool_call_id)"\s*:\s*"\w*"\s*,\s*)?'
    r'"(?:tool_)?name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_NO_OBJECT = re.compile(r'\{\s*[^"}\s]')
_NAME = re.compile(r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]*)"')
_NAME_STARTS = ('{"name":"', '{"type":"function","name":"')
_MAX_NAME_CHARS = 200
MAX_HEAD_CHARS = 1_000

_State = Literal["text", "calls", "object", "value", "arguments", "rest", "tail", "unopened"]


class ToolCallParser(StateParser[_State]):
    """Parser of one answer. The joined pieces do not depend on how the text is split.

    States: `text` outside calls; `calls` where a call may begin; `object` in a call that is an
    object, `arguments` in its arguments, `rest` after them; `unopened` in an object that is a call
    if a closing mark follows. `value` and `tail` are those of `NamedCallParser`.
    """

    def __init__(self, syntax: CallSyntax, names: Collection[str]) -> None:
        """names: of the functions that may be called."""
        super().__init__("calls" if syntax.is_bare else "text")
        self._syntax = syntax
        self._names = frozenset(names)
        self._openings = (syntax.opening, *syntax.other_openings)
        self._plain_marks = (*self._openings, *syntax.section, *syntax.dropped)
        self._marks = tuple(filter(None, (*self._plain_marks, syntax.closing)))
        self._held = ""  # marks and separators, which are content unless a call follows
        self._has_object = self._has_call = False  # since the last opening mark
        self._is_listed = False  # within a list of objects
        self._is_open = False  # in text between a call and its closing mark
        self._in_section = False
        self._object, self._num_scanned = JsonSpan(), 0  # characters that were fed to it
        self._arguments = JsonSpan()
        self._content = ContentWriter()

    def finish(self, *, is_cut: bool = False) -> Iterator[Piece]:
        """Yield the rest at the end of the answer; without the beginning of a call that is cut."""
        rest, self._buffer = self._buffer, ""
        content = self._last_content(rest, is_cut)
        if is_cut and not content and (rest or self._held):
            self._content.drop_space()
        yield from self._content.write(content)
        yield from self._content.finish(keeps_space=not self.num_calls)

    def _last_content(self, rest: str, is_cut: bool) -> str:
        match self._state:
            case "arguments":
                return ""
            case "text" | "unopened":
                return "" if is_cut and len(rest) > 1 else rest
        held = "" if self._has_call else self._held
        is_mark = self._has_call and self._syntax.closing.startswith(rest.strip(SPACE))
        return "" if is_mark or (is_cut and self._may_be_call(rest)) else held + rest

    def _may_be_call(self, start: str) -> bool:
        """Return whether an incomplete text, where a call may begin, can be one."""
        head = _HEAD.match(start)
        if head is not None:
            return self._is_known(json_or_none(head[1]))
        if self._has_call or self._in_section or self._held.strip(SPACE):
            return True
        is_half_mark = any(each.startswith(start) for each in self._marks)
        return len(start) > 1 and (is_half_mark or self._is_named(start) is not False)

    def _read_text(self) -> Iterator[Piece]:
        syntax = self._syntax
        marks = (*self._plain_marks, *([syntax.closing] if self._is_open else ()))
        start, mark = first_mark(self._buffer, marks)
        brace = self._buffer.find("{", 0, start) if syntax.finds_unopened else -1
        if brace >= 0:
            is_call = self._is_named(self._buffer[brace : brace + _MAX_NAME_CHARS])
            yield from self._content.write(self._take(brace + (is_call is False)))
            if is_call:
                self._begin_object("unopened")
            return
        yield from self._content.write(self._take(start))
        if mark is not None:
            yield from self._read_mark(mark)

    def _is_named(self, start: str) -> bool | None:
        """Return whether an object begins with the name of a function; None while it may."""
        if (named := _NAME.match(start)) is not None:
            return self._is_known(named[1])
        if len(start) >= _MAX_NAME_CHARS:
            return False
        written = "".join(start.split())
        for each in _NAME_STARTS:
            name = written.removeprefix(each)
            may_name = name != written and any(known.startswith(name) for known in self._names)
            if may_name or each.startswith(written):
                return None
        return False

    def _read_unopened(self) -> Iterator[Piece]:
        """Parse an object without an opening mark, which is a call if a closing mark follows."""
        self._scan_object()
        if not self._object.is_complete:
            return
        closing, after = self._syntax.closing, self._buffer[self._num_scanned :].lstrip(SPACE)
        if not after.startswith(closing) and closing.startswith(after):
            return
        self._state, text = "text", self._take(self._num_scanned)
        call = json_or_none(text) if after.startswith(closing) else None
        if isinstance(call, dict) and self._is_known(called_name(call)):
            self._buffer = after.removeprefix(closing)
            yield from self._whole_call(call)
        else:
            yield from self._content.write(text)

    def _read_calls(self) -> Iterator[Piece]:
        """Parse the next of what stands between marks: marks, separators and calls."""
        self._hold(len(self._buffer) - len(self._buffer.lstrip(SPACE)))
        if not self._buffer:
            return
        mark = next(filter(self._buffer.startswith, self._marks), None)
        if mark is not None:
            yield from self._read_mark(mark)
        elif any(each.startswith(self._buffer) for each in self._marks):
            return
        elif self._syntax.has_objects and self._buffer[0] == "{":
            self._begin_object("object")
        elif self._syntax.has_objects and self._is_separator(self._buffer[0]):
            self._hold(1)
        else:
            yield from self._read_other()

    def _read_mark(self, mark: str) -> Iterator[Piece]:
        syntax = self._syntax
        self._take(len(mark))
        self._is_listed = False
        if mark in self._openings:
            self._held = mark if self._has_call else self._held + mark
            self._has_object = self._has_call = self._is_open = False
            self._state = "calls"
            return
        is_stray = mark == syntax.closing and not (self._has_call or self._is_open)
        if not (self._has_call or self._is_open):
            yield from self._content.write(self._held + (mark if is_stray else ""))
        if not (is_stray or mark in syntax.dropped):
            self._content.drop_space()
        self._held, self._is_open = "", False
        if mark in syntax.section:
            self._in_section = mark == syntax.section[0]
        self._state = "calls" if self._in_section else "text"

    def _is_separator(self, char: str) -> bool:
        """Return whether a character separates calls; follow the brackets of a list."""
        if char in "[]":
            is_separator = self._is_listed if char == "]" else not self._has_object
            self._is_listed = char == "["
            return is_separator
        return (char in ",;" and self._has_object) or (char == "}" and self._has_call)

    def _read_other(self) -> Iterator[Piece]:
        yield from self._reject(0)

    def _reject(self, count: int) -> Iterator[Piece]:
        """Continue with text; what was held is content, as are the next `count` characters."""
        self._is_open = self._has_call and bool(self._syntax.closing)
        held, self._held = "" if self._has_call else self._held, ""
        self._has_object = self._has_call = self._is_listed = False
        self._state = "text"
        yield from self._content.write(held + self._take(count))

    def _begin_object(self, state: _State) -> None:
        self._state, self._object, self._num_scanned = state, JsonSpan(), 0

    def _scan_object(self) -> None:
        self._num_scanned += self._object.feed(self._buffer[self._num_scanned :])

    def _read_object(self) -> Iterator[Piece]:
        """Parse a call up to its arguments, which stream, or a complete call in another order."""
        if self._num_scanned < MAX_HEAD_CHARS:
            start = self._buffer[:MAX_HEAD_CHARS]
            if _NO_OBJECT.match(start):
                yield from self._reject(1)
                return
            head = _HEAD.match(start)
            if head is not None and self._is_known(json_or_none(head[1])):
                self._take(head.end())
                yield self._next_call(json.loads(head[1]))
                self._begin_arguments()
                return
        self._scan_object()
        if self._object.is_complete:
            yield from self._read_whole_object(self._take(self._num_scanned))

    def _read_whole_object(self, text: str) -> Iterator[Piece]:
        call = json_or_none(text)
        self._state = "calls"
        if isinstance(call, dict) and self._is_known(called_name(call)):
            yield from self._whole_call(call)
            return
        held, self._held = "" if self._has_call else self._held, ""
        self._has_object = True
        yield from self._content.write(held + text)
        is_call = isinstance(call, dict) and not call.keys().isdisjoint(ARGUMENTS_KEYS)
        if self._syntax.is_bare and not is_call:  # an answer in JSON
            self._state = "text"

    def _whole_call(self, call: dict[str, Any]) -> Iterator[Piece]:
        start = self._next_call(called_name(call))
        yield start
        yield CallArguments(start.index, arguments_text(call))

    def _begin_arguments(self) -> None:
        self._state, self._arguments = "arguments", JsonSpan()

    def _read_arguments(self) -> Iterator[Piece]:
        length = self._arguments.feed(self._buffer)
        if length:
            yield CallArguments(self.num_calls - 1, self._take(length))
        if self._arguments.is_complete:
            self._end_arguments()

    def _end_arguments(self) -> None:
        self._state, self._object, self._num_scanned = "rest", JsonSpan(depth=1), 0

    def _read_rest(self) -> Iterator[Piece]:
        """Parse a call's object after its arguments: further keys of it are dropped."""
        self._buffer = self._buffer.lstrip(SPACE)
        if not self._buffer:
            return
        self._scan_object()
        if self._object.is_complete and self._buffer[0] in ",}":
            self._take(self._num_scanned)
            self._state = "calls"
        elif self._buffer[0] != ",":
            self._state = "calls"
        elif (found := first_mark(self._buffer, self._marks)).text is not None:
            self._state = "calls"
            yield from self._content.write(self._take(found.start))

    def _is_known(self, name: Any) -> bool:
        return isinstance(name, str) and name in self._names

    def _next_call(self, name: str, call_id: str = "") -> CallStart:
        self._held, self._has_object, self._has_call = "", True, True
        self._content.drop_space()
        self.num_calls += 1
        return CallStart(self.num_calls - 1, name, call_id)

    def _hold(self, count: int) -> None:
        """Hold the next characters, which are content unless a call follows."""
        self._held += self._take(count)
