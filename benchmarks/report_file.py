"""Output of a benchmark: a JSON file, and the same JSON as the last line printed."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

DOCS = Path("docs/benchmarks")


def command_line(module: str, arguments: Sequence[str]) -> str:
    """Return the shell command that repeats a run."""
    return shlex.join(["python", "-m", module, *arguments])


def write_report(report: DataclassInstance, path: Path) -> None:
    """Writes the file, and the line to standard output."""
    write_text(path, json.dumps(asdict(report), indent=1) + "\n")
    print(json.dumps(asdict(report)))


def write_text(path: Path, text: str) -> None:
    """Write a file, and create its directory if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def add_output(parser: argparse.ArgumentParser, name: str) -> None:
    """The option `--output`; plots and pages go beside that file."""
    path = DOCS / f"{name}.json"
    parser.add_argument("--output", type=Path, default=path, help=f"for the JSON; {path}")
