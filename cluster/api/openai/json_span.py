"""Incremental search for the end of a JSON value."""

from __future__ import annotations


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
