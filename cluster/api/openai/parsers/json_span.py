"""JSON values within a text: their ends, the arguments of a call, and escapes that are missing."""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress
from typing import Any

from cluster.api.openai.parsers.pieces import escape_lone_surrogates, json_text

ARGUMENTS_KEYS = ("arguments", "parameters")
CONSTANTS = {"True": "true", "False": "false", "None": "null", "null": "null"}
"""Python's constants, which models mix in, and null, as JSON."""
HIGH_SURROGATE = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_STRUCTURE = re.compile(r'["{}\[\]]')
_QUOTE_OR_ESCAPE = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'[^"{}\[\]]*+(?:(?P<quote>")|(?P<open>[{\[])|(?P<close>[}\]]))?')
_HIGH, _LOW = HIGH_SURROGATE, r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_PLAIN = r'\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
_HALF = rf"\\(?:u[0-9a-fA-F]{{0,3}})?\Z|{_HIGH}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?\Z"
IN_STRING = re.compile(
    rf'(?P<quote>")|(?P<text>(?:[^"\\\x00-\x1f]++|{_PLAIN}|{_HIGH}{_LOW})++)|(?P<half>{_HALF})'
    rf"|(?P<lone>{_HIGH}|{_LOW})|(?P<invalid>(?s:.))"
)
"""Parts of a string; `half` is an escape, or a pair of them, that more text may complete."""


class JsonSpan:
    """Scanner of one object, array or string. It counts brackets and does not validate."""

    def __init__(self, depth: int = 0) -> None:
        """depth: number of brackets that are open."""
        self._depth = depth
        self._in_string = False
        self._is_escaped = False
        self.is_complete = False

    def feed(self, text: str) -> int:
        """Scan `text` and return how many of its characters belong to the value."""
        place = 0
        while place < len(text) and not self.is_complete:
            place = (
                self._step_in_string(text, place) if self._in_string else self._step(text, place)
            )
        return place

    def _step(self, text: str, place: int) -> int:
        """Scan up to the next quote or bracket; return the place after it."""
        found = _STRUCTURE.search(text, place)
        if found is None:
            return len(text)
        if found[0] == '"':
            self._in_string = True
        elif found[0] in "{[":
            self._depth += 1
        else:
            self._depth -= 1
            self.is_complete = self._depth <= 0
        return found.end()

    def _step_in_string(self, text: str, place: int) -> int:
        """Scan up to the next quote or escape; return the place after it."""
        if self._is_escaped:
            self._is_escaped = False
            return place + 1
        found = _QUOTE_OR_ESCAPE.search(text, place)
        if found is None:
            return len(text)
        self._is_escaped = found[0] == "\\"
        self._in_string = self._is_escaped
        self.is_complete = not self._in_string and self._depth == 0
        return found.end()


class EscapedStrings:
    """Writer of an object in which some models do not escape what strings of JSON cannot contain.

    Escapes control characters, and backslashes that begin no escape. Other text stays as it is, as
    does all of a text that is no object.
    """

    def __init__(self) -> None:
        self._is_object: bool | None = None
        self._in_string, self._depth = False, 0
        self._held = ""  # the start of an escape

    @property
    def is_complete(self) -> bool:
        """Return whether the braces of the object are closed, or the text is no object."""
        return self._is_object is not None and self._depth <= 0

    def feed(self, text: str) -> str:
        """Add `text` and return what is certain to follow in the object."""
        if self._is_object is None and (start := text.lstrip()):
            self._is_object = start.startswith("{")
        if not self._is_object:
            return text
        text, self._held = self._held + text, ""
        written, place = list[str](), 0
        while place < len(text):
            found = (IN_STRING if self._in_string else _OUTSIDE).match(text, place)
            assert found is not None, "every character is in a part"
            place = found.end()
            written.append(self._written(found))
        return "".join(written)

    def _written(self, found: re.Match[str]) -> str:
        part = found[0]
        match found.lastgroup:
            case "quote":
                self._in_string = not self._in_string
            case "open":
                self._depth += 1
            case "close":
                self._depth -= 1
            case "half":
                self._held = part
                return ""
            case "invalid":
                return escaped(part)
        return part


def escaped(part: str) -> str:
    """Return a character of a string as JSON."""
    return json.dumps(part)[1:-1]


def json_or_none(text: str) -> Any:
    """Parse JSON, of which an object may have strings that are not escaped.

    Return None if it is malformed, also by NaN or an infinite number.
    """
    for write in (str, EscapedStrings().feed):
        with suppress(ValueError, RecursionError):
            return json.loads(write(text), parse_constant=_finite, parse_float=_finite)
    return None


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is no JSON number")
    return value


def called_name(call: dict[str, Any]) -> Any:
    """Return the name of the function in a call; None without any."""
    return call.get("name", call.get("tool_name"))


def arguments_text(call: dict[str, Any]) -> str:
    """Return the arguments as JSON text; some models write them as a JSON string.

    Empty ones are an empty object.
    """
    arguments: Any = next((call[key] for key in ARGUMENTS_KEYS if key in call), {})
    if isinstance(arguments, str):
        return escape_lone_surrogates(arguments) if arguments.strip() not in _EMPTY else "{}"
    return json_text(arguments or {})


_EMPTY = ("", "null")
