"""Stop strings that name special tokens, in an output whose text leaves these tokens out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

from specdec.text.tokenizer import Tokenizer


class StopMatch(NamedTuple):
    """A stop string in a text, from character `start` to `end`, special tokens not counted."""

    end: int
    start: int
    stop: str


class MarkedStops:
    """Search for stop strings in the text of all tokens, those outside the visible text included.

    visible: the stop strings without special tokens, as the visible text contains them.
    """

    def __init__(self, stops: tuple[str, ...], names: Mapping[int, str]) -> None:
        """Search for `stops`, each with one of `names`: strings of special tokens by id."""
        self._stops = stops
        self._names = names
        self._max_chars = max(map(len, stops))
        self._all = ""  # the last characters of the output, with those of special tokens
        self._is_visible: list[bool] = []  # of each of them
        self.visible = tuple(filter(None, map(self._without_names, stops)))

    @classmethod
    def of(cls, tokenizer: Tokenizer, stops: tuple[str, ...]) -> Self | None:
        """Return the search for those of `stops` that name a special token; None if none does."""
        if not stops:
            return None
        names = tokenizer.special_token_strings
        marked = tuple(each for each in stops if any(name in each for name in names.values()))
        return cls(marked, names) if marked else None

    def find_at_token(self, token_id: int, num_chars: int) -> Sequence[StopMatch]:
        """Add a token outside the text of `num_chars`; return the stop strings that it completes.

        Unassigned tokens have no characters.
        """
        return self._find(self._names.get(token_id, ""), num_chars, is_visible=False)

    def find_in_text(self, new: str, num_chars: int) -> Sequence[StopMatch]:
        """Add characters of the text, `num_chars` with them; return what they complete."""
        return self._find(new, num_chars, is_visible=True)

    def _find(self, new: str, num_chars: int, *, is_visible: bool) -> Sequence[StopMatch]:
        num_known = len(self._all)
        text = self._all + new
        flags = self._is_visible + [is_visible] * len(new)
        found = []
        for stop in self._stops:
            start = text.find(stop, max(0, num_known - len(stop) + 1)) if new else -1
            if start >= 0:
                end = start + len(stop)
                found.append(
                    StopMatch(num_chars - sum(flags[end:]), num_chars - sum(flags[start:]), stop)
                )
        self._all, self._is_visible = text[-self._max_chars :], flags[-self._max_chars :]
        return found

    def _without_names(self, stop: str) -> str:
        for name in self._names.values():
            stop = stop.replace(name, "")
        return stop
