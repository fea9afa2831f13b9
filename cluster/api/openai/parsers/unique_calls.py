"""Ends a list of forced calls at the first call that repeats an earlier one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cluster.api.openai.parsers.pieces import AnswerParser, CallArguments, CallStart, Piece


class UniqueCalls:
    """Parser of an answer of forced calls, which ends at the first one that repeats another.

    A grammar that demands one or more calls does not end them, and some models write the same call
    up to the end of the context. The pieces of a call are withheld while it may be a repeated one;
    a call with the name and the arguments of an earlier one is dropped, with all that follows.
    """

    def __init__(self, parser: AnswerParser) -> None:
        """parser: of all the calls."""
        self._parser = parser
        self._calls: list[tuple[str, list[str]]] = []  # names, and arguments in pieces
        self._earlier: list[str] = []  # arguments that the current call may repeat
        self._num_same = 0  # characters that they share with its arguments
        self._withheld: list[Piece] = []
        self.has_ended = False
        self.num_calls = 0

    def feed(self, text: str) -> Iterator[Piece]:
        """Add `text` and yield the pieces that are complete."""
        if not self.has_ended:
            yield from self._unique(self._parser.feed(text))

    def finish(self, *, is_cut: bool = False) -> Iterator[Piece]:
        """Yield the rest at the end of the answer; of a call that is cut, what is no repetition."""
        if not self.has_ended:
            yield from self._unique(self._parser.finish(is_cut=is_cut))
        if not (self.has_ended or is_cut):
            yield from self._release()

    def _unique(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if isinstance(piece, CallStart):
                yield from self._release()
                self._begin(piece.name)
            elif isinstance(piece, CallArguments):
                self._add(piece.text)
            if self.has_ended:
                return
            self._withheld.append(piece)
            if not self._earlier:
                yield from self._release()

    def _begin(self, name: str) -> None:
        self._earlier = ["".join(text) for known, text in self._calls if known == name]
        self._calls.append((name, []))
        self._num_same = 0

    def _add(self, text: str) -> None:
        """Add to the arguments of the current call; end the list if they repeat earlier ones."""
        self._calls[-1][1].append(text)
        self._earlier = [each for each in self._earlier if each.startswith(text, self._num_same)]
        self._num_same += len(text)
        self.has_ended = any(len(each) == self._num_same for each in self._earlier)

    def _release(self) -> Iterator[Piece]:
        for piece in self._withheld:
            self.num_calls += isinstance(piece, CallStart)
            yield piece
        self._withheld = []
