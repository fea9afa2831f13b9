"""Events as the page reads them: text/event-stream of the HTML standard, section 9.2."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any


def event(name: str, data: Mapping[str, Any]) -> bytes:
    """One event. JSON has no line breaks of its own, so one line of data holds it."""
    text = json.dumps(data, ensure_ascii=False, default=datetime.isoformat)
    return f"event: {name}\ndata: {text}\n\n".encode()
