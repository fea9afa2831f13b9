"""Finds where a JSON value ends, in text that comes in pieces."""

from __future__ import annotations


class JsonSpan:
    """Follows one object, array or string. It counts brackets and does not check what is inside."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self.is_complete = False

    def feed(self, text: str) -> int:
        """Goes on through `text`; how much of it belongs to the value."""
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
