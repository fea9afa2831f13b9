"""Reads JSON bodies as text that can be sent back: UTF-8 without lone surrogates."""

from __future__ import annotations

import json
from typing import Any


def read_json(body: bytes) -> Any:
    """Parse JSON in UTF-8.

    Raise JSONDecodeError for other text, UnicodeDecodeError for another encoding,
    UnicodeEncodeError for lone surrogates, ValueError for very long numbers, and RecursionError.
    From bytes, `json.loads` would accept the encoding of lone surrogates, and UTF-16.
    """
    content = json.loads(body.decode("utf-8-sig"))
    if b"\\ud" in body.lower():  # an escape, perhaps of half a character
        json.dumps(content, ensure_ascii=False).encode()
    return content
