"""Prompts files: conversations to answer, each of a suite."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.types.errors import InvalidValueError

_LIMIT = (
    "a JSON string, or an object with prompt (a string) or turns (a list of strings), and "
    "optionally suite (a string)"
)


@dataclass(frozen=True)
class PromptRecord:
    """The user's turns of one conversation. suite: empty where the file does not name one."""

    turns: tuple[str, ...]
    suite: str = ""


def read_prompts(path: Path, field: str = "prompts") -> list[PromptRecord]:
    """Read a JSON lines file in order. field: name for errors.

    Raises InvalidValueError for another content, with the line, and for a file without prompts.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValueError(field, path, f"a readable UTF-8 file ({error})") from error
    records = [
        _read(line, f"{path} line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not records:
        raise InvalidValueError(field, path, "a JSON lines file with at least one prompt")
    return records


def read_prefixes(path: Path) -> tuple[str, ...]:
    """Read a JSON lines file of first words of prompts. Raises as `read_prompts` does."""
    turns = [record.turns for record in read_prompts(path, "prompt_prefixes")]
    longest = max(turns, key=len)
    if len(longest) > 1:
        raise InvalidValueError("prompt_prefixes", longest, "one string a line")
    return tuple(first for [first] in turns)


def select_prompts(
    prompts: Sequence[PromptRecord], suites: Sequence[str], num_prompts: int | None
) -> list[PromptRecord]:
    """Return the first prompts of each suite, in the order of the file.

    suites: empty for all. num_prompts: of each suite; None for all. Raises InvalidValueError for a
    suite without prompts.
    """
    known = tuple(dict.fromkeys(each.suite for each in prompts))
    for suite in suites:
        if suite not in known:
            raise InvalidValueError("suites", suite, f"one of {', '.join(known)}")
    return [
        record
        for suite in suites or known
        for record in [each for each in prompts if each.suite == suite][:num_prompts]
    ]


def _read(line: str, where: str) -> PromptRecord:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    fields = record if isinstance(record, dict) else {"prompt": record}
    turns, suite = fields.get("turns", [fields.get("prompt")]), fields.get("suite", "")
    are_texts = isinstance(turns, list) and all(isinstance(each, str) and each for each in turns)
    if not (are_texts and turns and isinstance(suite, str)):
        raise InvalidValueError(where, line[:80], _LIMIT)
    return PromptRecord(tuple(turns), suite)
