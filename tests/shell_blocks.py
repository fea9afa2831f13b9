"""Parses the code blocks and shell commands of documents."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    path: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Return the commands, one per line; a backslash at the end continues a line."""
        joined = self.text.replace("\\\n", " ")
        return [line.strip() for line in joined.splitlines() if line.strip()]


def blocks_of(path: Path, language: str) -> list[Block]:
    """Return all blocks of a language, in their order."""
    text = path.read_text(encoding="utf-8")
    return [
        Block(path, text.count("\n", 0, match.start()) + 1, language, match.group(2))
        for match in _BLOCK.finditer(text)
        if match.group(1) == language
    ]


def words_of(command: str) -> list[str]:
    """Split a command into words as the shell does, without comments."""
    return shlex.split(command, comments=True)
