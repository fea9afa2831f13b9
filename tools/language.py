"""Checks the language of the repository: rejected words, long paragraphs, the length of the README.

`python -m tools.language` prints one line for each finding, as `path:line: word -> what to write
instead`, and exits with status 1 if there are any. `tools/language.yaml` lists the words.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
WORD_LIST = Path(__file__).with_suffix(".yaml")
CHECKED = (
    *("*.py", "*.pyi", "*.md", "*.h", "*.cpp", "*.js", "*.html", "*.css", "*.proto"),
    *("*.yaml", "*.yml", "*.tpl", "*.txt", "*.toml", "*.service", "*Makefile", "*Dockerfile.*"),
)
PROSE = (
    *("README.md", ":(glob)docs/**/*.md", "k8s/specdec/README.md"),
    *("deploy/README.md", "benchmarks/README.md"),
)
MAX_PARAGRAPH_WORDS = 90
MAX_README_LINES = 150

_BETWEEN_WORDS = r"(?:[\s#*/]+|_)"
_FENCE = re.compile(r"^\s*(```|~~~)")
_LIST_ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")


@dataclass(frozen=True)
class Finding:
    """A place in a file, and what to change there."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@dataclass(frozen=True)
class WordList:
    """The rejected words, each form with what to write instead, and the names that are allowed."""

    instead: dict[str, str]
    allowed: re.Pattern[str]
    skipped: tuple[str, ...]
    """Paths that are not checked."""

    @classmethod
    def load(cls, path: Path = WORD_LIST) -> WordList:
        """Read the list from its file."""
        content = yaml.safe_load(path.read_text())
        instead = {form: word["instead"] for word in content["words"] for form in word["forms"]}
        allowed = re.compile("|".join(each["pattern"] for each in content["allowed"]))
        return cls(instead, allowed, tuple(each["path"] for each in content["skipped"]))

    @property
    def pattern(self) -> re.Pattern[str]:
        """Every form as a whole word; an underscore or a hyphen ends a word."""
        longest_first = sorted(self.instead, key=len, reverse=True)
        forms = "|".join(form.replace(" ", _BETWEEN_WORDS) for form in longest_first)
        return re.compile(rf"(?<![A-Za-z0-9])(?:{forms})(?![A-Za-z0-9])", re.IGNORECASE)


def rejected_words(path: str, text: str, words: WordList) -> Iterator[Finding]:
    """Find rejected words in a text, in their order."""
    allowed = words.allowed.sub(lambda match: " " * len(match.group()), text)
    for match in words.pattern.finditer(allowed):
        form = re.sub(_BETWEEN_WORDS, " ", match.group().lower())
        line = text.count("\n", 0, match.start()) + 1
        yield Finding(path, line, f"{form} -> {words.instead[form]}")


def paragraphs(markdown: str) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each paragraph.

    A list item is a paragraph. Code blocks, tables and headings are left out.
    """
    first, lines, is_code = 0, list[str](), False
    for number, line in enumerate([*markdown.splitlines(), ""], 1):
        is_fence = _FENCE.match(line) is not None
        is_code ^= is_fence
        is_prose = not (is_code or is_fence) and line.strip() and line.lstrip()[0] not in "|#"
        if lines and (not is_prose or _LIST_ITEM.match(line)):
            yield first, " ".join(lines)
            lines = []
        if is_prose:
            first = first if lines else number
            lines.append(_LIST_ITEM.sub("", line).strip())


def long_paragraphs(path: str, markdown: str) -> Iterator[Finding]:
    """Find paragraphs that have too many words; a link counts as its text."""
    for line, text in paragraphs(markdown):
        num_words = len(_LINK.sub(r"\1", text).split())
        if num_words > MAX_PARAGRAPH_WORDS:
            advice = f"split the paragraph, or make it a list (limit {MAX_PARAGRAPH_WORDS})"
            yield Finding(path, line, f"{num_words} words -> {advice}")


def long_readme(path: str, markdown: str) -> Iterator[Finding]:
    """Find out whether the README at the top of the repository is too long."""
    num_lines = len(markdown.splitlines())
    if path == "README.md" and num_lines > MAX_README_LINES:
        advice = f"move the rest to docs/ (limit {MAX_README_LINES})"
        yield Finding(path, MAX_README_LINES + 1, f"{num_lines} lines -> {advice}")


def tracked_files(patterns: tuple[str, ...], skipped: tuple[str, ...]) -> list[str]:
    """List the files under version control that match a pattern and are not skipped."""
    excluded = [f":(exclude,glob){path}" for path in skipped]
    command = ["git", "ls-files", "-z", "--", *patterns, *excluded]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for path in listed.split("\0") if path and (ROOT / path).is_file()]


def findings() -> Iterator[Finding]:
    """Check every file: the words first, then the paragraphs."""
    words = WordList.load()
    for path in tracked_files(CHECKED, words.skipped):
        yield from rejected_words(path, (ROOT / path).read_text(), words)
    for path in tracked_files(PROSE, ()):
        markdown = (ROOT / path).read_text()
        yield from chain(long_paragraphs(path, markdown), long_readme(path, markdown))


def main() -> int:
    """Print the findings, and return the exit status."""
    found = list(findings())
    for finding in found:
        print(finding)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
