"""Incremental parser of tool calls between marks, in the syntax of a model family.

A call is an opening mark, a head with its name, the arguments, and a closing mark. Arguments in
JSON are passed on as they arrive. Those in tags are converted to JSON by the types of the
function's schema when the call is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cluster.api.openai.parsers.pieces import (
    CallArguments,
    CallStart,
    ContentWriter,
    Piece,
    first_mark,
    json_text,
)
from cluster.api.openai.parsers.tool_format import Tool, deepseek_mark
from cluster.api.openai.parsers.tool_parser import JsonSpan, arguments_text, json_or_none

_State = Literal["text", "call", "arguments", "after", "list"]
_MAX_HEAD_CHARS = 1_000
_LAST_TAGS = ("</function>", "</arg_value>")
"""Ends of a call that has all its arguments, though not its closing mark."""

TagReader = Callable[[str], dict[str, str] | None]
"""Returns the texts of the parameters in the body of a call by name; None beside other text."""


@dataclass(frozen=True)
class MarkedSyntax:
    """Syntax of a model family.

    opening, closing: marks of a call; an empty closing mark is the end of its arguments.
    head: the text between the opening mark and the arguments, with the group `name`, and perhaps
        `call_id`.
    ignored: marks around all calls.
    tags: reads arguments in tags; None for arguments in JSON.
    """

    opening: str
    closing: str
    head: re.Pattern[str]
    ignored: tuple[str, ...] = ()
    tags: TagReader | None = None


class MarkedCallParser:
    """Parser of one answer. A call of an unknown function, or a malformed one, becomes content."""

    def __init__(self, syntax: MarkedSyntax, tools: Sequence[Tool]) -> None:
        """tools: the functions that may be called."""
        self._syntax = syntax
        self._tools = {each.name: each for each in tools}
        self._state: _State = "text"
        self._buffer = ""
        self._arguments = JsonSpan()
        self._content = ContentWriter()
        self.num_calls = 0

    def feed(self, text: str) -> Iterator[Piece]:
        """Add `text` and yield the pieces that are complete."""
        self._buffer += text
        while True:
            before = self._state, len(self._buffer)
            yield from self._read()
            if (self._state, len(self._buffer)) == before:
                return

    def finish(self) -> Iterator[Piece]:
        """Yield the rest at the end of the answer; of a call that is cut, what is known of it."""
        rest, self._buffer = self._buffer, ""
        match self._state:
            case "call":
                yield from self._finish_call(rest)
            case "text":
                yield from self._content.write(rest)
            case "after" if not self._syntax.closing.startswith(rest.strip()):
                yield from self._content.write(rest)
        yield from self._content.finish(keeps_space=not self.num_calls)

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
        syntax = self._syntax
        start, mark = first_mark(self._buffer, (syntax.opening, *syntax.ignored))
        yield from self._content.write(self._take(start))
        if mark is None:
            return
        self._content.drop_space()
        self._take(len(mark))
        if mark == syntax.opening:
            self._state = "call"

    def _read_call(self) -> Iterator[Piece]:
        if self._syntax.tags is not None:
            end = self._buffer.find(self._syntax.closing)
            if end >= 0:
                body = self._take(end)
                self._take(len(self._syntax.closing))
                self._state = "text"
                yield from self._tagged_call(body, self._syntax.closing)
            return
        head = self._syntax.head.match(self._buffer)
        if head is not None and head["name"] in self._tools:
            self._take(head.end())
            self._arguments, self._state = JsonSpan(), "arguments"
            yield self._next_call(head["name"], head.groupdict().get("call_id") or "")
        elif head is not None or len(self._buffer) > _MAX_HEAD_CHARS:
            self._state = "text"
            yield from self._content.write(self._syntax.opening)
            yield from self._content.write(self._take(head.end() if head else _MAX_HEAD_CHARS))

    def _read_arguments(self) -> Iterator[Piece]:
        length = self._arguments.feed(self._buffer)
        if length:
            yield CallArguments(self.num_calls - 1, self._take(length))
        if self._arguments.is_complete:
            self._state = "after" if self._syntax.closing else "text"

    def _read_after(self) -> Iterator[Piece]:
        """Drop what is left of a call up to its closing mark, unless another mark comes first."""
        syntax = self._syntax
        start, mark = first_mark(self._buffer, (syntax.closing, syntax.opening, *syntax.ignored))
        if mark is None:
            return
        if mark == syntax.closing:
            start += len(mark)
        self._take(start)
        self._state = "text"
        yield from ()

    def _tagged_call(self, body: str, closing: str) -> Iterator[Piece]:
        """Yield a complete call with arguments in tags, or its text where it is malformed."""
        head, read = self._syntax.head.match(body), self._syntax.tags
        assert read is not None, "the syntax has no tags"
        tool = self._tools.get(head["name"]) if head is not None else None
        arguments = _arguments_of(body[head.end() :], tool, read) if head and tool else None
        if tool is None or arguments is None:
            yield from self._content.write(f"{self._syntax.opening}{body}{closing}")
            return
        start = self._next_call(tool.name)
        yield start
        yield CallArguments(start.index, json_text(arguments))

    def _finish_call(self, rest: str) -> Iterator[Piece]:
        if self._syntax.tags is not None and rest.rstrip().endswith(_LAST_TAGS):
            yield from self._tagged_call(rest, "")
        else:
            yield from self._content.write(self._syntax.opening + rest)

    def _next_call(self, name: str, call_id: str = "") -> CallStart:
        self.num_calls += 1
        return CallStart(self.num_calls - 1, name, call_id)

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken


class MistralCallParser(MarkedCallParser):
    """Parser of Mistral's calls; earlier models write a list of objects after the mark."""

    def __init__(self, syntax: MarkedSyntax, tools: Sequence[Tool]) -> None:
        """tools: the functions that may be called."""
        super().__init__(syntax, tools)
        self._object = JsonSpan()  # the current one of a list
        self._num_scanned = 0  # characters of the buffer that were fed to it

    def _read(self) -> Iterator[Piece]:
        if self._state == "list":
            yield from self._read_list()
        else:
            yield from super()._read()

    def _read_call(self) -> Iterator[Piece]:
        rest = self._buffer.lstrip()
        if rest.startswith("["):
            self._buffer, self._state = rest[1:], "list"
        else:
            yield from super()._read_call()

    def _read_list(self) -> Iterator[Piece]:
        """Parse the next object of the list, once it is complete."""
        self._buffer = self._buffer.lstrip(" \t\r\n,")
        if self._buffer.startswith("]"):
            self._take(1)
            self._state = "text"
        elif self._buffer.startswith("{"):
            self._num_scanned += self._object.feed(self._buffer[self._num_scanned :])
            if self._object.is_complete:
                text = self._take(self._num_scanned)
                self._object, self._num_scanned = JsonSpan(), 0
                yield from self._object_call(text)
        elif self._buffer:
            self._state = "text"

    def _object_call(self, text: str) -> Iterator[Piece]:
        call = json_or_none(text)
        if not isinstance(call, dict) or call.get("name") not in self._tools:
            yield from self._content.write(text)
            return
        start = self._next_call(str(call["name"]))
        yield start
        yield CallArguments(start.index, arguments_text(call))

    def finish(self) -> Iterator[Piece]:
        """Yield the rest at the end of the answer; an incomplete object of a list is content."""
        self._state = "text" if self._state == "list" else self._state
        yield from super().finish()


def _schema_of(tool: Tool, parameter: str) -> Mapping[str, Any]:
    properties = tool.parameters.get("properties")
    schema = properties.get(parameter) if isinstance(properties, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    """Return a parameter's value: the text itself for a string, else the JSON that it is.

    A text that is no JSON stays a text, and Python's names of constants are read, too.
    """
    kinds = schema.get("type", ())
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    is_string = "string" in kinds or (not kinds and _are_strings(schema.get("enum")))
    constants = {"True": True, "False": False, "None": None}
    if is_string:
        return None if text == "null" and "null" in kinds else text
    if text.strip() in constants:
        return constants[text.strip()]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _are_strings(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(each, str) for each in values)


_FUNCTION_END = "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_PARAMETER_HEAD = re.compile(rf"\s*{_PARAMETER}([^>\n]+)>")
_KEY_HEAD, _KEY_END = re.compile(r"\s*<arg_key>"), "</arg_key>"
_VALUE_HEAD, _VALUE_END = re.compile(rf"{_KEY_END}\s*<arg_value>"), "</arg_value>"


def _arguments_of(body: str, tool: Tool, read: TagReader) -> dict[str, Any] | None:
    """Return the arguments in the body of a call, in tags or a JSON object; None if malformed."""
    texts = read(body)
    if texts is not None:
        return {name: _typed(text, _schema_of(tool, name)) for name, text in texts.items()}
    given = json_or_none(body.strip().removesuffix(_FUNCTION_END))
    return given if isinstance(given, dict) else None


def _parameters(body: str) -> dict[str, str] | None:
    """Read `<parameter=NAME>` tags, without the line breaks around their texts.

    A tag that is not closed ends where the next one begins. Takes linear time, as each search ends
    there.
    """
    body = body.rstrip().removesuffix(_FUNCTION_END)
    texts, place = dict[str, str](), 0
    while head := _PARAMETER_HEAD.match(body, place):
        start, following = head.end(), body.find(_PARAMETER, head.end())
        limit = len(body) if following < 0 else following
        closed = body.find(_PARAMETER_END, start, limit)
        end, place = (limit, limit) if closed < 0 else (closed, closed + len(_PARAMETER_END))
        texts[head[1].strip()] = body[start:end].removeprefix("\n").removesuffix("\n")
    return None if body[place:].strip() else texts


def _arguments(body: str) -> dict[str, str] | None:
    """Read pairs of `<arg_key>` and `<arg_value>`; the last value need not be closed."""
    texts, place = dict[str, str](), 0
    while head := _KEY_HEAD.match(body, place):
        name_end = body.find(_KEY_END, head.end())
        value = _VALUE_HEAD.match(body, name_end) if name_end >= 0 else None
        if value is None:
            return None
        closed = body.find(_VALUE_END, value.end())
        end, place = (len(body),) * 2 if closed < 0 else (closed, closed + len(_VALUE_END))
        texts[body[head.end() : name_end].strip()] = body[value.end() : end]
    return None if body[place:].strip() else texts


_NAME = r"(?P<name>[a-zA-Z0-9_.-]+)"

_DEEPSEEK_SECTION = (deepseek_mark("tool calls begin"), deepseek_mark("tool calls end"))

SYNTAXES: Mapping[str, MarkedSyntax] = {
    "mistral": MarkedSyntax(
        "[TOOL_CALLS]",
        "",
        re.compile(rf"\s*{_NAME}(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?\s*(?=\{{)"),
    ),
    "qwen3_coder": MarkedSyntax(
        "<tool_call>", "</tool_call>", re.compile(rf"\s*<function={_NAME}>"), tags=_parameters
    ),
    "deepseek_v3": MarkedSyntax(
        deepseek_mark("tool call begin"),
        deepseek_mark("tool call end"),
        re.compile(rf"\s*function{deepseek_mark('tool sep')}{_NAME}\s*```json\s*(?=\{{)"),
        _DEEPSEEK_SECTION,
    ),
    "deepseek_v31": MarkedSyntax(
        deepseek_mark("tool call begin"),
        deepseek_mark("tool call end"),
        re.compile(rf"\s*{_NAME}{deepseek_mark('tool sep')}\s*(?=\{{)"),
        _DEEPSEEK_SECTION,
    ),
    "glm45": MarkedSyntax(
        "<tool_call>", "</tool_call>", re.compile(rf"\s*{_NAME}\s*"), tags=_arguments
    ),
    "kimi_k2": MarkedSyntax(
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        re.compile(
            rf"\s*(?P<call_id>(?:functions\.)?{_NAME}:\d+)\s*"
            r"<\|tool_call_argument_begin\|>\s*(?=\{)"
        ),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
}
"""Syntax of the marked calls of each family, by the name of its parser in vLLM and SGLang."""
