"""Prompts as a file of JSON lines holds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specdec.types.errors import InvalidValueError


def read_prompts(path: Path) -> list[str]:
    """The prompts of a JSON lines file: each line a text, or an object with `prompt` or `turns`.

    Of turns the first is taken. Raises InvalidValueError for anything else, and for no prompts.
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
        limit = "a JSON text, or an object with prompt, a text, or turns, a list of texts"
        raise InvalidValueError(where, line[:80], limit)
    return record
