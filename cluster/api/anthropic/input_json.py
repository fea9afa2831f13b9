"""The input of calls as JSON that clients can parse and send back, from what the model writes."""

from __future__ import annotations

import re
from typing import Literal

from cluster.api.http.bodies import MAX_JSON_DEPTH
from cluster.api.openai.parsers.json_span import (
    CONSTANTS,
    HIGH_SURROGATE,
    IN_STRING,
    escaped,
    json_or_none,
)

_TOKEN = re.compile(r'(?P<space>[ \t\r\n]+)|(?P<mark>["{}\[\]:,])|(?P<word>[^ \t\r\n"{}\[\]:,]+)')
_MAX_WORD_CHARS = 4_300  # the longest integer that Python parses
_MAX_DEPTH = MAX_JSON_DEPTH - 6  # less the levels above the input in the client's next request
_ENDS = {"{": "}", "[": "]"}
_MISSING = {"colon": ": null", "value": "null"}
"""Completion of a member of an object whose value is not readable."""


class InputWriter:
    """Incremental writer of the object that a call has as its input.

    JSON stays as it is. Control characters and invalid backslashes in strings are escaped, halves
    of characters become U+FFFD, commas too many are left out, and words that are no values become
    null. At any other error the object is completed, and the rest of the text is left out. A text
    without errors that is cut stays incomplete until `finish`.
    """

    def __init__(self) -> None:
        self._open: list[str] = []  # the ends of the open objects and lists
        # `value` follows a colon; `item`, in a list, may be its end
        self._expected: Literal["object", "key", "colon", "value", "item", "end"] = "object"
        self._in_string = self._is_complete = False
        self._held = ""  # the start of a word or an escape
        # A comma and the whitespace after it, or whitespace before all, until a value follows.
        self._gap: list[str] = []

    def feed(self, text: str) -> str:
        """Add `text` and return what is certain to follow in the object."""
        text, self._held = self._held + text, ""
        written, place = list[str](), 0
        while place < len(text) and not self._is_complete:
            found = (IN_STRING if self._in_string else _TOKEN).match(text, place)
            assert found is not None, "every character is in a part"
            place = found.end()
            if place == len(text) and self._may_go_on(found):
                self._held = found[0][: _MAX_WORD_CHARS + 1]
            else:
                written.append(self._write(found.lastgroup, found[0]))
        return "".join(written)

    def finish(self) -> str:
        """Return what ends the object if the model has ended its text too early."""
        if self._is_complete or (self._expected == "object" and not self._in_string):
            return ""
        held, self._held = self._held, ""
        if self._in_string:
            written = "\\ufffd" if re.match(HIGH_SURROGATE, held) else ""
            return written + self._write("quote", '"') + self._complete()
        return (self._write("word", held) if held else "") + self._complete()

    def _may_go_on(self, last: re.Match[str]) -> bool:
        """Return whether more text may change the last part."""
        is_value = last.lastgroup == "word" and self._expected in ("value", "item")
        return last.lastgroup == "half" or is_value

    def _write(self, kind: str | None, part: str) -> str:
        match kind:
            case "space" if self._gap or self._expected == "object":
                self._gap.append(part)
                return ""
            case "space" | "text":
                return part
            case "quote":
                self._in_string = False
                self._expected = "colon" if self._expected == "key" else "end"
                return part
            case "lone":
                return "\\ufffd"
            case "invalid":
                return escaped(part)
            case "mark":
                return self._write_mark(part)
        if self._expected not in ("value", "item"):
            return self._complete()
        is_json = len(part) <= _MAX_WORD_CHARS and json_or_none(part) is not None
        value = CONSTANTS.get(part, part if is_json else "null")
        self._expected = "end"
        return self._take_gap() + value

    def _write_mark(self, mark: str) -> str:
        expected = self._expected
        match mark:
            case "{" | "[" if len(self._open) < _MAX_DEPTH and self._may_open(mark):
                self._open.append(_ENDS[mark])
                self._expected = "key" if mark == "{" else "item"
                return self._take_gap() + mark
            case '"' if expected in ("key", "value", "item"):
                self._in_string = True
                return self._take_gap() + mark
            case ":" if expected == "colon":
                self._expected = "value"
                return mark
            case "," if expected in ("key", "item"):  # one too many
                return ""
            case "," if expected == "end":
                self._expected, self._gap = "key" if self._open[-1] == "}" else "item", [mark]
                return ""
            case "}" | "]" if self._open[-1:] == [mark] and expected in ("key", "item", "end"):
                self._gap, self._expected = [], "end"
                self._is_complete = len(self._open) == 1
                return self._open.pop()
        return self._complete()

    def _may_open(self, mark: str) -> bool:
        return self._expected in ("value", "item") or (self._expected, mark) == ("object", "{")

    def _take_gap(self) -> str:
        gap, self._gap = "".join(self._gap), []
        return gap

    def _complete(self) -> str:
        """End the object before an error."""
        self._is_complete = True
        if self._expected == "object":
            return "{}"
        return _MISSING.get(self._expected, "") + "".join(reversed(self._open))
