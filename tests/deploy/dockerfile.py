"""What a Dockerfile says, as far as ours go: one word an instruction, backslashes, no heredocs."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Instruction:
    """word: RUN, COPY and so on. text: the rest, on one line."""

    word: str
    text: str

    @property
    def listed(self) -> list[str]:
        """Of the exec form."""
        words = json.loads(self.text[self.text.index("[") :])
        assert all(isinstance(word, str) for word in words)
        return words


@dataclass(frozen=True)
class Copy:
    """sources: of the build context. None of them comes from another stage."""

    sources: list[str]
    destination: str


def stages(path: Path) -> list[list[Instruction]]:
    """The instructions of each stage, its FROM first."""
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
    """From the build context alone."""
    words = [shlex.split(each.text) for each in of_word(stage, "COPY")]
    ours = [each for each in words if not any(word.startswith("--from") for word in each)]
    return [Copy(each[:-1], each[-1]) for each in ours]


def environment(stage: list[Instruction]) -> dict[str, str]:
    pairs = (pair for each in of_word(stage, "ENV") for pair in shlex.split(each.text))
    return dict(pair.split("=", 1) for pair in pairs)
