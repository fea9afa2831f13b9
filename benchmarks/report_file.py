"""Output of a benchmark: a JSON file, and the same JSON as the last line printed."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

DOCS = Path("docs/benchmarks")


def parse_options(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """Return the options, with the shell command that repeats the run as `command`.

    parser: named as the module. arguments: those of the process by default.
    """
    assert parser.prog.startswith("benchmarks."), parser.prog
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_args(given)
    options.command = shlex.join(["python", "-m", parser.prog, *given])
    return options


def write_report(report: DataclassInstance | Mapping[str, Any], path: Path | None) -> None:
    """Write a report to a JSON file, if there is a path, and print it as one line of JSON."""
    plain = dict(report) if isinstance(report, Mapping) else asdict(report)
    if path is not None:
        write_text(path, json.dumps(plain, indent=1) + "\n")
    print(json.dumps(plain))


def write_text(path: Path, text: str) -> None:
    """Write a file, and create its directory if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def add_output(parser: argparse.ArgumentParser, name: str | None = None) -> None:
    """Add the option `--output`; charts and pages are written next to that file.

    name: of the default file under docs/benchmarks; without one nothing is written by default.
    """
    path = DOCS / f"{name}.json" if name else None
    default = str(path) if path else "none"
    parser.add_argument("--output", type=Path, default=path, help=f"JSON file (default: {default})")


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(columns), *lines[1:]])
