"""JSON values within a text: where they end, and the arguments of a call in one."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from cluster.api.openai.parsers.pieces import escape_lone_surrogates, json_text

ARGUMENTS_KEYS = ("arguments", "parameters")
CONSTANTS = {"True": "true", "False": "false", "None": "null", "null": "null"}
"""Python's constants, which models mix in, and null, as JSON."""
_STRUCTURE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')


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
        found = _IN_STRING.search(text, place)
        if found is None:
            return len(text)
        self._is_escaped = found[0] == "\\"
        self._in_string = self._is_escaped
        self.is_complete = not self._in_string and self._depth == 0
        return found.end()


def json_or_none(text: str) -> Any:
    """Parse JSON; return None if it is malformed, also by NaN or an infinite number."""
    try:
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
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
