"""Parser for the subset of Dockerfile syntax that ours use: continuation lines, no heredocs."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Instruction:
    """Instruction of a Dockerfile. word: RUN, COPY and so on. text: the rest, on one line."""

    word: str
    text: str

    @property
    def listed(self) -> list[str]:
        """Return the arguments of the exec form."""
        words = json.loads(self.text[self.text.index("[") :])
        assert all(isinstance(word, str) for word in words)
        return words


@dataclass(frozen=True)
class Copy:
    """COPY instruction from the build context, not from another stage."""

    sources: list[str]
    destination: str


def stages(path: Path) -> list[list[Instruction]]:
    """Return the instructions of each stage; the first one is its FROM."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found: list[list[Instruction]] = []
    for line in filter(str.strip, text.splitlines()):
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            found.append([])
        found[-1].append(Instruction(word, rest.strip()))
    return found


def of_word(stage: list[Instruction], word: str) -> list[Instruction]:
    return [each for each in stage if each.word == word]


def copies(stage: list[Instruction]) -> list[Copy]:
    """Return the COPY instructions whose sources are in the build context."""
    words = [shlex.split(each.text) for each in of_word(stage, "COPY")]
    ours = [each for each in words if not any(word.startswith("--from") for word in each)]
    return [Copy(each[:-1], each[-1]) for each in ours]


def environment(stage: list[Instruction]) -> dict[str, str]:
    pairs = (pair for each in of_word(stage, "ENV") for pair in shlex.split(each.text))
    return dict(pair.split("=", 1) for pair in pairs)
