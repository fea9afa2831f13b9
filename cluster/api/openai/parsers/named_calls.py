"""Incremental parser of calls whose name stands before their arguments, not within an object."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.api.openai.parsers.pieces import CallArguments, Piece
from cluster.api.openai.parsers.tag_pattern import first_match
from cluster.api.openai.parsers.tool_parser import MAX_HEAD_CHARS, SPACE, ToolCallParser

_NULL = "null"


class NamedCallParser(ToolCallParser):
    """Parser of one answer, whose calls are a head, arguments and perhaps a closing mark.

    States: `calls` where a head may begin; `value` where its arguments may begin; `arguments`;
    `tail` after them, up to the closing mark.
    """

    _named: tuple[str, str] | None = None  # name and id of the current call

    def finish(self, *, is_cut: bool = False) -> Iterator[Piece]:
        """Yield the rest at the end of the answer; without the beginning of a call that is cut."""
        is_ended = self._state == "value" and not self._syntax.closing and not is_cut
        if is_ended and not self._buffer.strip(SPACE):
            yield from self._empty_call()
        yield from super().finish(is_cut=is_cut)

    def _read_other(self) -> Iterator[Piece]:
        """Parse the head of a call, unless the text cannot begin one."""
        found = first_match(self._syntax.heads, self._buffer[:MAX_HEAD_CHARS])
        if found is None or self._is_listed:
            yield from self._reject(0)
        elif found[1].is_partial:
            if len(self._buffer) > MAX_HEAD_CHARS:
                yield from self._reject(MAX_HEAD_CHARS)
        elif (named := self._syntax.read_name(found[1].name, self._names)) is None:
            yield from self._reject(found[1].end)
        else:
            self._named, self._state = named, "value"
            self._held = "" if self._has_call else self._held
            self._has_call = False
            self._hold(found[1].end)

    def _read_value(self) -> Iterator[Piece]:
        """Parse up to the arguments, an object; where there are none, they are empty."""
        self._hold(len(self._buffer) - len(self._buffer.lstrip(SPACE)))
        ends = (*self._marks, *filter(None, (self._syntax.fence,)), _NULL)
        found = next(filter(self._buffer.startswith, ends), None)
        if self._buffer.startswith("{"):
            assert self._named is not None, "arguments without a head"
            yield self._next_call(*self._named)
            self._begin_arguments()
        elif found is not None:
            self._take(len(_NULL) if found == _NULL else 0)
            yield from self._empty_call()
        elif not any(each.startswith(self._buffer) for each in ends):
            yield from self._reject(0)

    def _empty_call(self) -> Iterator[Piece]:
        assert self._named is not None, "a call without a head"
        start = self._next_call(*self._named)
        yield start
        yield CallArguments(start.index, "{}")
        self._end_arguments()

    def _end_arguments(self) -> None:
        if self._named is None:
            super()._end_arguments()
            return
        self._named, self._state = None, "tail" if self._syntax.closing else "text"

    def _read_tail(self) -> Iterator[Piece]:
        """Drop what may stand between arguments and closing mark; anything else is content."""
        self._buffer = self._buffer.lstrip(SPACE)
        fence = self._syntax.fence
        if fence and self._buffer.startswith(fence):
            self._take(len(fence))
        elif any(self._buffer.startswith(each) for each in self._marks):
            self._state = "calls"
        elif self._buffer and not any(
            each.startswith(self._buffer) for each in (*self._marks, fence)
        ):
            yield from self._reject(0)
