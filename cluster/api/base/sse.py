"""Server-sent events: text/event-stream of the HTML standard, section 9.2."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterable, Callable, Mapping
from datetime import datetime
from json.encoder import encode_basestring
from typing import Any

from fastapi.responses import StreamingResponse

STREAM_HEADERS: Mapping[str, str] = {"cache-control": "no-store", "x-accel-buffering": "no"}

EMPTY_LINE = b"\n"
COMMENT = b": waiting for the next token\n\n"
"""Bytes that keep a connection open and that clients ignore."""


def event(data: str, name: str | None = None) -> bytes:
    """Encode one event. data: JSON on one line."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {data}\n\n".encode()


class TextEvents:
    """Events that differ in one text of their JSON; all else is encoded once."""

    def __init__(self, encode: Callable[[str], bytes]) -> None:
        """encode: returns the event with a text."""
        mark = secrets.token_hex(16)
        self._parts = encode(mark).split(f'"{mark}"'.encode())

    def encode(self, text: str) -> bytes:
        """Return the event with this text."""
        return encode_basestring(text).encode().join(self._parts)


def json_event(name: str, data: Mapping[str, Any]) -> bytes:
    """Encode one event with JSON data; datetimes become ISO 8601 strings."""
    return event(json.dumps(data, ensure_ascii=False, default=datetime.isoformat), name)


def event_response(events: AsyncIterable[bytes]) -> StreamingResponse:
    """Return a response that streams the events."""
    return StreamingResponse(events, media_type="text/event-stream", headers=STREAM_HEADERS)
