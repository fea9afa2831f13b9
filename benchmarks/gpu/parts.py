"""Parts of a check, and the report that holds their results.

The report is written after each part. A run skips the parts that a report of the same source,
device and torch has already, so a machine that is lent for minutes at a time finishes it.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.report_file import write_text

Result = dict[str, Any]
"""Findings of a part, as JSON. `passed` is False where a check failed; `skipped` is the reason of a
part that could not run."""

_POLL_S = 0.05
_TRACEBACK_LINES = 15


class PartSkippedError(Exception):
    """A part cannot run here; the message is the reason."""


def _drop(result: Result) -> None:
    del result


@dataclass(frozen=True)
class Context:
    """Where the parts run.

    model: directory of a real model; None for random ones alone. peer_url: of another service with
    the same model, to compare. directory: for files of random models. is_small: shapes for a test,
    which take seconds on a CPU. save: stores what a part has found so far, which the report has if
    the part does not end.
    """

    device: torch.device
    directory: Path
    model: Path | None = None
    peer_url: str | None = None
    is_small: bool = False
    save: Callable[[Result], None] = _drop

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"


Run = Callable[[Context], Result]


@dataclass(frozen=True)
class Part:
    """One part of the check.

    needs_gpu: whether its figures mean something on a GPU only. limit_s: time after which it is
    stopped. is_timed: whether it measures times, and so has the machine for itself. least_s: time
    without which it is not begun, since it would not end.
    """

    name: str
    run: Run
    needs_gpu: bool = False
    limit_s: float = 120.0
    is_timed: bool = True
    least_s: float = 0.0


class RunningPart(Protocol):
    """A part that was started."""

    def poll(self) -> Result | None:
        """Return its result with the seconds that it took; None while it runs."""
        ...


Start = Callable[[Part, Context, float], RunningPart]
"""Starts a part, which has a number of seconds to end."""


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
        if "skipped" in result:
            self.skipped[name] = result["skipped"]
        else:
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
    start: Start | None = None,
) -> None:
    """Run the parts that the report lacks, until `limit_s` seconds have passed.

    Consecutive parts that measure no times run side by side. A part that fails is recorded with its
    error, and the others run. start: `start_here` unless given.
    """
    ends_at_s = clock() + limit_s
    start = start or start_here
    for is_timed, group in groupby(parts, key=lambda part: part.is_timed):
        running: dict[str, RunningPart] = {}
        for part in group:
            if part.name in report.parts:
                continue
            if part.needs_gpu and not context.is_gpu:
                report.add(part.name, {"skipped": "needs a GPU"})
            elif (left_s := ends_at_s - clock()) <= part.least_s:
                reason = f"no time left of {limit_s / 60:g} minutes; the next run continues here"
                if left_s > 0:
                    reason = f"needs {part.least_s:.0f} s of a run, which has {left_s:.0f} left"
                report.add(part.name, {"skipped": reason})
            else:
                running[part.name] = start(part, context, min(part.limit_s, left_s))
                if is_timed:
                    _collect(running, report)
        _collect(running, report)
    report.write()


def _collect(running: dict[str, RunningPart], report: PartReport) -> None:
    """Add the results of parts to the report, in the order in which they end."""
    while running:
        ended = {name: result for name, part in running.items() if (result := part.poll())}
        for name, result in ended.items():
            del running[name]
            report.add(name, result)
        if running and not ended:
            time.sleep(_POLL_S)


@dataclass(frozen=True)
class EndedPart:
    """A RunningPart that has ended."""

    result: Result

    def poll(self) -> Result:
        """See RunningPart."""
        return self.result


def start_here(part: Part, context: Context, limit_s: float) -> EndedPart:
    """Run a part in this process, to its end whatever time it takes."""
    del limit_s
    return EndedPart(run_part(part, context))


def run_part(part: Part, context: Context) -> Result:
    """Run a part; return its result, or its error with the end of the traceback."""
    began_at_s = time.monotonic()
    try:
        result = part.run(context)
    except PartSkippedError as skipped:
        return {"skipped": str(skipped)}
    except Exception as error:  # the other parts run all the same
        result = failure(error)
    return {**result, "seconds": round(time.monotonic() - began_at_s, 1)}


def failure(error: Exception) -> Result:
    """Return an error as a result."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    return {
        "passed": False,
        "error": f"{type(error).__name__}: {error}",
        "traceback": lines[-_TRACEBACK_LINES:],
    }


Case = tuple[str, Callable[[], Result]]
"""Name of a case of a part, and what runs it."""


def run_cases(cases: Sequence[Case], context: Context) -> Result:
    """Run the cases of a part, which passes if all of them do; save the results after each.

    The device is synchronized after each case, so that an error of a kernel is that of its case.
    An error of the device itself ends the part: nothing runs after it in the same process.
    """
    found: dict[str, Result] = {}
    result: Result = {"passed": True, "cases": found}
    for name, run in _saved(cases, context, result):
        try:
            found[name] = run()
            if context.is_gpu:
                torch.cuda.synchronize(context.device)
        except Exception as error:  # the other cases run all the same
            found[name] = failure(error)
            if "CUDA error" in str(error) or "illegal memory access" in str(error):
                result |= {"passed": False, "error": f"{name}: {error}"}
                break
    return result | {"passed": all(each.get("passed", True) for each in found.values())}


def _saved(cases: Sequence[Case], context: Context, result: Result) -> Iterator[Case]:
    """Yield cases; store before each what was found, and which one runs."""
    for name, run in cases:
        context.save({**result, "passed": False, "error": f"did not end; ran case {name}"})
        yield name, run


def share_differing(left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> float:
    """Return the share of answers that differ."""
    return sum(a != b for a, b in zip(left, right, strict=True)) / len(left)
