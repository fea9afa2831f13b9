"""Patterns of tags that are matched against a text that may go on."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_MAX_SPACE = 1_000
SPACE = re.compile(rf"\s{{0,{_MAX_SPACE}}}")


class TagMatch(NamedTuple):
    """end: of the match in the text. name: in the tags; empty for none.

    is_partial: whether the text ends within the pattern, so that more of it has to be known.
    """

    end: int
    name: str = ""
    is_partial: bool = False


class TagPattern:
    """A sequence of literals and runs of characters; a run with the group `name` is the name."""

    def __init__(self, *parts: str | re.Pattern[str]) -> None:
        """parts: no run may contain a character that begins the next part."""
        self._parts = parts

    def match(self, text: str, place: int = 0) -> TagMatch | None:
        """Match at a place; return None where the text cannot match, however it goes on."""
        name = ""
        for part in self._parts:
            end = _literal_end(part, text, place) if isinstance(part, str) else place
            if isinstance(part, re.Pattern) and (run := part.match(text, place)) is not None:
                end, name = run.end(), run.groupdict().get("name", name)
                if end == len(text):
                    return TagMatch(end, name, is_partial=True)
            elif end == place:
                return TagMatch(place, name, is_partial=True) if _may(part, text, place) else None
            place = end
        return TagMatch(place, name)


def _literal_end(literal: str, text: str, place: int) -> int:
    return place + len(literal) if text.startswith(literal, place) else place


def _may(part: str | re.Pattern[str], text: str, place: int) -> bool:
    """Return whether a part may match once the text goes on."""
    rest = text[place:]
    return not rest or (isinstance(part, str) and part.startswith(rest))


def first_match(
    patterns: Iterable[TagPattern], text: str, place: int = 0
) -> tuple[TagPattern, TagMatch] | None:
    """Return the first pattern that matches wholly, else one that may; None if none can."""
    found = [(each, match) for each in patterns if (match := each.match(text, place)) is not None]
    whole = [each for each in found if not each[1].is_partial]
    return next(iter(whole or found), None)
