"""Incremental parser of calls whose arguments are plain text between tags, or one object.

A value may contain any mark. It ends at its closing tag where a tag follows that may stand there:
the next argument or the end of the call. Values are converted to JSON by the function's schema
when the call is complete. A call whose last value is not closed is none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cluster.api.openai.parsers.argument_types import ArgumentTypes
from cluster.api.openai.parsers.gemma_object import GemmaSpan, gemma_object
from cluster.api.openai.parsers.json_span import JsonSpan, json_or_none
from cluster.api.openai.parsers.pieces import (
    CallArguments,
    CallStart,
    ContentWriter,
    Piece,
    StateParser,
    first_mark,
    json_text,
)
from cluster.api.openai.parsers.tag_pattern import SPACE, TagMatch, TagPattern, first_match
from cluster.api.openai.parsers.tool_format import Tool

_State = Literal["text", "head", "tags", "object", "value"]
_NEVER = TagPattern(re.compile(r"(?!)"))


@dataclass(frozen=True)
class TaggedSyntax:
    """Syntax of a model family.

    opening, closing: marks of a call, or of several where each has its own end before `closing`.
    head: from the opening mark to the arguments, with the name. unopened: mark of a head that is
        found without its opening mark; empty for none.
    argument: up to its value, with the name. value_end: after it.
    end: of a call. next_call: opening and head of the next one, which may take its place.
    lost: end of a call, for one whose last value was not closed.
    strips_lines: whether a value has a line break before and after it.
    span, read_object: scanner and parser of an object that stands for all arguments.
    """

    opening: str
    closing: str
    head: TagPattern
    ends: tuple[TagPattern, ...]
    next_call: TagPattern
    argument: TagPattern = _NEVER
    value_end: TagPattern = _NEVER
    lost: TagPattern = _NEVER
    unopened: str = ""
    strips_lines: bool = False
    span: type[JsonSpan] | type[GemmaSpan] = JsonSpan
    read_object: Callable[[str], Any] = json_or_none


_NAME = re.compile(r"(?P<name>[a-zA-Z0-9_.-]{1,128})")
_KEY = (
    SPACE,
    "<arg_key>",
    re.compile(r"(?P<name>[^<]{1,200})"),
    "</arg_key>",
    SPACE,
    "<arg_value>",
)
_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_GEMMA_MARKS = ("<|tool_call>", "<tool_call|>")
_GEMMA_HEAD = (SPACE, "call:", _NAME)


@dataclass(frozen=True)
class _Tags:
    """Tags within the marks of a call.

    function, end: before the name of the function, and after its arguments. parameter: before the
    name of an argument, `key`. bracket: after both names.
    """

    function: str
    end: str
    parameter: str
    key: re.Pattern[str]
    bracket: str

    def syntax(self, mark: str, *, strips_lines: bool = False) -> TaggedSyntax:
        """Return the syntax of calls between tags with the name `mark`."""
        opening, closing = f"<{mark}>", f"</{mark}>"
        head = (SPACE, self.function, _NAME, self.bracket)
        return TaggedSyntax(
            opening,
            closing,
            head=TagPattern(*head),
            argument=TagPattern(SPACE, self.parameter, self.key, self.bracket),
            value_end=TagPattern("</parameter>"),
            ends=(TagPattern(SPACE, self.end), TagPattern(SPACE, closing)),
            next_call=TagPattern(SPACE, opening, *head),
            lost=TagPattern(self.end, SPACE, closing),
            unopened=self.function,
            strips_lines=strips_lines,
        )


_FUNCTION = _Tags(
    "<function=", "</function>", "<parameter=", re.compile(r"(?P<name>[^>\n]{1,200})"), ">"
)
_INVOKE = _Tags(
    '<invoke name="',
    "</invoke>",
    '<parameter name="',
    re.compile(r'(?P<name>[^"\n]{1,200})'),
    '">',
)

SYNTAXES: Mapping[str, TaggedSyntax] = {
    "qwen3_coder": _FUNCTION.syntax("tool_call", strips_lines=True),
    "seed_oss": _FUNCTION.syntax("seed:tool_call"),
    "minimax_m2": _INVOKE.syntax("minimax:tool_call"),
    "gemma4": TaggedSyntax(
        *_GEMMA_MARKS,
        head=TagPattern(*_GEMMA_HEAD),
        ends=(TagPattern(SPACE, _GEMMA_MARKS[1]),),
        next_call=TagPattern(SPACE, _GEMMA_MARKS[0], *_GEMMA_HEAD),
        span=GemmaSpan,
        read_object=gemma_object,
    ),
    "glm45": TaggedSyntax(
        _OPENING,
        _CLOSING,
        head=TagPattern(SPACE, _NAME),
        argument=TagPattern(*_KEY),
        value_end=TagPattern("</arg_value>"),
        ends=(TagPattern(SPACE, _CLOSING),),
        next_call=TagPattern(SPACE, _OPENING, SPACE, _NAME, *_KEY),
        lost=TagPattern(_CLOSING),
    ),
}
"""Syntax of each family, by the name of its parser in vLLM and SGLang."""


class TaggedCallParser(StateParser[_State]):
    """Parser of one answer. A call of an unknown function, or a malformed one, becomes content.

    States: `text` outside calls; `head` after an opening mark; `tags` before an argument or the end
    of a call; `value` in an argument; `object` in one that stands for all arguments.
    """

    def __init__(self, syntax: TaggedSyntax, tools: Sequence[Tool]) -> None:
        """tools: the functions that may be called."""
        super().__init__("text")
        self._syntax = syntax
        self._tools = {each.name: each for each in tools}
        self._types: dict[str, ArgumentTypes] = {}
        self._read_so_far: list[str] = []  # text of the current call, which may yet be content
        self._is_open = False  # between a call and its closing mark
        self._content = ContentWriter()
        self._name = self._key = ""
        self._value: list[str] = []
        self._texts: dict[str, str] = {}
        self._object = syntax.span()
        self._given: Any = None  # arguments in an object in place of tags

    def finish(self, *, is_cut: bool = False) -> Iterator[Piece]:
        """Yield the rest at the end of the answer; a call that is not complete is content."""
        is_beginning = self._state != "text" or len(self._buffer) > 1
        may_close = self._state == "text" and self._is_open
        is_closing = may_close and self._syntax.closing.startswith(self._buffer)
        self._take(0 if is_closing else len(self._buffer))
        if is_cut and is_beginning:
            self._content.drop_space()
        else:
            yield from self._content.write("".join(self._read_so_far))
        yield from self._content.finish(keeps_space=not self.num_calls)

    def _read_text(self) -> Iterator[Piece]:
        syntax = self._syntax
        closing = syntax.closing if self._is_open else ""
        marks = filter(None, (syntax.opening, syntax.unopened, closing))
        start, mark = first_mark(self._buffer, marks)
        yield from self._content.write(self._buffer[:start])
        self._buffer = self._buffer[start:]
        if mark is None:
            return
        if mark == syntax.closing:
            self._content.drop_space()
            self._buffer, self._is_open = self._buffer[len(mark) :], False
            return
        self._take(len(mark) if mark == syntax.opening else 0)
        self._state = "head"

    def _read_head(self) -> Iterator[Piece]:
        head = self._syntax.head.match(self._buffer)
        if head is None:
            yield from self._reject(0 if any(self._read_so_far) else len(self._syntax.unopened))
        elif not head.is_partial and head.name not in self._tools:
            yield from self._reject(head.end)
        elif not head.is_partial:
            self._take(head.end)
            self._state, self._name, self._texts, self._given = "tags", head.name, {}, None

    def _read_tags(self) -> Iterator[Piece]:
        syntax = self._syntax
        is_first = not self._texts and self._given is None
        patterns = (*([] if self._given is not None else [syntax.argument]), *syntax.ends)
        found = first_match((*patterns, syntax.next_call), self._buffer)
        rest = self._buffer.lstrip()
        if found is None and is_first and rest.startswith("{"):
            self._take(len(self._buffer) - len(rest))
            self._state, self._object, self._value = "object", syntax.span(), []
        elif found is None:
            yield from self._reject(0)
        elif not found[1].is_partial:
            yield from self._read_tag(*found)

    def _read_tag(self, pattern: TagPattern, match: TagMatch) -> Iterator[Piece]:
        syntax = self._syntax
        if pattern is syntax.argument:
            self._take(match.end)
            self._state, self._key, self._value = "value", match.name, []
            return
        self._take(0 if pattern is syntax.next_call else match.end)
        self._is_open = pattern is syntax.ends[0] and len(syntax.ends) > 1
        yield from self._call()

    def _read_value(self) -> Iterator[Piece]:
        """Parse a value up to where it may end, and keep only the text that may be its end."""
        place = self._buffer.find("</")
        while place >= 0:
            closed, lost = self._end_of_value(place), self._end_of_lost(place)
            if closed is not None and not closed.is_partial:
                self._add_value(place)
                self._take(closed.end - place)
                return
            if lost is not None and not lost.is_partial:
                yield from self._reject(lost.end)
                return
            if closed is not None or lost is not None:
                break
            place = self._buffer.find("</", place + 2)
        else:
            place = len(self._buffer) - self._buffer.endswith("<")
        self._value.append(self._take(place))

    def _end_of_value(self, place: int) -> TagMatch | None:
        """Match the closing tag of a value and what may follow it; `end` is that of the tag."""
        syntax = self._syntax
        closed = syntax.value_end.match(self._buffer, place)
        if closed is None or closed.is_partial:
            return closed
        following = (syntax.argument, *syntax.ends, syntax.next_call)
        found = first_match(following, self._buffer, closed.end)
        if found is None:
            return None
        pattern, match = found
        is_argument = pattern is syntax.argument and not match.is_partial
        if is_argument and match.name.strip() in {*self._texts, self._key.strip()}:
            return None  # one that was given cannot follow
        return closed._replace(is_partial=match.is_partial)

    def _end_of_lost(self, place: int) -> TagMatch | None:
        """Match the end of a call whose last value was not closed, before another call."""
        lost = self._syntax.lost.match(self._buffer, place)
        if lost is None or lost.is_partial:
            return lost
        following = self._syntax.next_call.match(self._buffer, lost.end)
        return TagMatch(lost.end, is_partial=following.is_partial) if following else None

    def _add_value(self, length: int) -> None:
        text = "".join((*self._value, self._take(length)))
        if self._syntax.strips_lines:
            text = text.removeprefix("\n").removesuffix("\n")
        self._texts[self._key.strip()] = text
        self._state = "tags"

    def _read_object(self) -> Iterator[Piece]:
        self._value.append(self._take(self._object.feed(self._buffer)))
        if self._object.is_complete:
            self._given = self._syntax.read_object("".join(self._value))
            self._value, self._state = [], "tags"
            if not isinstance(self._given, dict):
                yield from self._reject(0)

    def _call(self) -> Iterator[Piece]:
        types = self._types.get(self._name) or ArgumentTypes(self._tools[self._name].parameters)
        self._types[self._name] = types
        arguments: Any = {name: types.value(name, text) for name, text in self._texts.items()}
        start = CallStart(self.num_calls, self._name)
        self.num_calls += 1
        self._content.drop_space()
        self._read_so_far, self._state = [], "text"
        yield start
        yield CallArguments(
            start.index, json_text(arguments if self._given is None else self._given)
        )

    def _reject(self, count: int) -> Iterator[Piece]:
        """Continue with text: what was read of the call is content, and `count` characters."""
        self._take(count)
        text, self._read_so_far = "".join(self._read_so_far), []
        self._state = "text"
        yield from self._content.write(text)

    def _take(self, count: int) -> str:
        """Take characters of the current call."""
        taken = super()._take(count)
        self._read_so_far.append(taken)
        return taken
