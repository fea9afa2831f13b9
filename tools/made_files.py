"""Files that code makes: written, or compared with what it would make now."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

MadeFiles = Mapping[Path, Callable[[], str]]
"""What makes the text of each. One may be made of those before it."""


def write_files(files: MadeFiles) -> None:
    """Makes all of them."""
    for path, make in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(make(), encoding="utf-8")


def changed_files(files: MadeFiles) -> list[Path]:
    """Those that are missing, or not as they would be made."""
    return [path for path, make in files.items() if _read(path) != make()]


def run(files: MadeFiles, command: str, usage: str | None, arguments: Sequence[str]) -> int:
    """Writes them, or with the argument `check` names those that differ; the exit status.

    command: what makes them, for that message. usage: for other arguments.
    """
    match list(arguments):
        case []:
            write_files(files)
            return 0
        case ["check"]:
            changed = changed_files(files)
            for path in changed:
                print(f"{path} is not as `{command}` makes it", file=sys.stderr)
            return 1 if changed else 0
        case _:
            print(usage)
            return 2


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None
