"""Reads prompts from JSON lines files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specdec.types.errors import InvalidValueError


def read_prompts(path: Path) -> list[str]:
    """Read a JSON lines file; each line is a text, or an object with `prompt` or `turns`.

    Only the first turn is used. Raises InvalidValueError for other content and for an empty file.
    """
    lines = enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1)
    prompts = [_prompt(line, f"{path} line {number}") for number, line in lines if line.strip()]
    if not prompts:
        raise InvalidValueError(str(path), "", "JSON lines, one prompt each")
    return prompts


def _prompt(line: str, where: str) -> str:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError:
        record = None
    if isinstance(record, dict):
        turns = record.get("turns")
        record = turns[0] if isinstance(turns, list) and turns else record.get("prompt")
    if not isinstance(record, str) or not record:
        limit = "a JSON string, or an object with prompt (a string) or turns (a list of strings)"
        raise InvalidValueError(where, line[:80], limit)
    return record
