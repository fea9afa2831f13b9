"""Objects as Gemma 4 writes them: like JSON, with keys and constants bare and texts between marks.

`{city:<|"|>Ulm<|"|>,days:3}` is `{"city": "Ulm", "days": 3}`. A text has no escapes.
"""

from __future__ import annotations

import json
import re
from typing import Any

from cluster.api.openai.parsers.json_span import CONSTANTS, json_or_none
from cluster.api.openai.parsers.pieces import first_mark

_QUOTE = '<|"|>'
_STRUCTURE = re.compile(rf"{re.escape(_QUOTE)}|[{{}}\[\]]")
_BARE = re.compile(r"([^{}\[\],:]+)(:?)")


class GemmaSpan:
    """Scanner of one object. It counts brackets and does not validate."""

    def __init__(self) -> None:
        """Begin before the object."""
        self._depth = 0
        self._in_text = False
        self.is_complete = False

    def feed(self, text: str) -> int:
        """Scan `text` and return how many of its characters belong to the object.

        The beginning of a mark at the end is left for the next call.
        """
        place = 0
        while not self.is_complete and (found := _STRUCTURE.search(text, place)) is not None:
            place = found.end()
            if found[0] == _QUOTE:
                self._in_text = not self._in_text
            elif not self._in_text:
                self._depth += 1 if found[0] in "{[" else -1
                self.is_complete = self._depth <= 0
        if self.is_complete:
            return place
        return place + first_mark(text[place:], (_QUOTE,)).start


def gemma_object(text: str) -> Any:
    """Parse an object; return None if it is malformed."""
    parts = text.split(_QUOTE)
    written = (
        json.dumps(part) if index % 2 else _BARE.sub(_as_json, part)
        for index, part in enumerate(parts)
    )
    return json_or_none("".join(written))


def _as_json(bare: re.Match[str]) -> str:
    """Write a key or a constant as JSON; a word that is no constant is a text."""
    text, colon = bare[1].strip(), bare[2]
    if not text:
        return colon
    is_json = text in CONSTANTS or json_or_none(text) is not None
    if colon:
        return (text if text.startswith('"') and is_json else json.dumps(text)) + colon
    return CONSTANTS.get(text, text) if is_json else json.dumps(text)
