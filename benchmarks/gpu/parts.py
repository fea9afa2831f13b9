"""Parts of a check that run one after the other, and continue after an interruption.

The report is written after each part. A run skips the parts that a report of the same source,
device and torch has already, so a machine that is lent for minutes at a time finishes it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.report_file import write_text

logger = logging.getLogger(__name__)

Result = dict[str, Any]
"""What a part found, as JSON. `passed` is False where a check failed."""


class PartSkippedError(Exception):
    """A part cannot run here; the message is the reason."""


@dataclass(frozen=True)
class Context:
    """Where the parts run.

    model: directory of a real model; None for random ones alone. directory: for files of random
    models. is_small: shapes for a test, which take seconds on a CPU.
    """

    device: torch.device
    directory: Path
    model: Path | None = None
    is_small: bool = False

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"


@dataclass(frozen=True)
class Part:
    """One part of the check.

    needs_gpu: whether its figures mean something on a GPU only.
    """

    name: str
    run: Callable[[Context], Result]
    needs_gpu: bool = False


class PartReport:
    """The results of the parts in a JSON file.

    head: identifies what was measured; results of another head are dropped.
    """

    def __init__(self, path: Path | None, head: Mapping[str, Any]) -> None:
        """Read the file, if there is one with the same head."""
        self._path = path
        self._head = dict(head)
        self.parts: dict[str, Result] = {}
        self.skipped: dict[str, str] = {}
        if path is not None and path.is_file():
            stored = json.loads(path.read_text(encoding="utf-8"))
            if stored.get("head") == self._head:
                self.parts = stored["parts"]

    @property
    def passed(self) -> bool:
        """Return whether no part failed."""
        return all(each.get("passed", True) for each in self.parts.values())

    def add(self, name: str, result: Result) -> None:
        """Add the result of a part, and write the file."""
        self.parts[name] = result
        self.skipped.pop(name, None)
        self.write()

    def write(self) -> None:
        """Write the file, if there is a path."""
        if self._path is not None:
            write_text(self._path, json.dumps(self.to_json(), indent=1) + "\n")

    def to_json(self) -> dict[str, Any]:
        """Return the whole report."""
        return {
            "head": self._head,
            "passed": self.passed,
            "parts": self.parts,
            "skipped": self.skipped,
        }


def run_parts(
    parts: Sequence[Part],
    context: Context,
    report: PartReport,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run the parts that the report lacks, until `limit_s` seconds have passed.

    A part that fails is recorded with its error, and the others run.
    """
    ends_at_s = clock() + limit_s
    for part in parts:
        if part.name in report.parts:
            continue
        reason = ""
        if part.needs_gpu and not context.is_gpu:
            reason = "needs a GPU"
        elif clock() >= ends_at_s:
            reason = f"no time left of {limit_s / 60:g} minutes; the next run continues here"
        if reason:
            report.skipped[part.name] = reason
            continue
        began_at_s = clock()
        try:
            result = part.run(context)
        except PartSkippedError as skipped:
            report.skipped[part.name] = str(skipped)
            continue
        except Exception as error:  # the other parts run all the same
            logger.exception("part %s failed", part.name)
            result = {"passed": False, "error": f"{type(error).__name__}: {error}"}
        report.add(part.name, {**result, "seconds": round(clock() - began_at_s, 1)})
        if context.is_gpu:
            torch.cuda.empty_cache()
    report.write()
