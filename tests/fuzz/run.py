"""Runs the doors on a real service, and checks afterwards that it holds nothing and lives."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from specdec.client import AdminClient, SpeculationChange
from tests.chaos.suite import idle_faults
from tests.e2e.conftest import ALWAYS_DRAFT, RunningService, running_service
from tests.fuzz.doors import Door, ViolationError
from tests.fuzz.file_doors import file_doors
from tests.fuzz.service_doors import service_doors

NUM_AT_ONCE = 6
"""Inputs of the service at a time. Files and arguments are tried one after the other."""
FLAGS = ["--max-model-len", "512", "--max-queue-len", "40", *ALWAYS_DRAFT]


@dataclass
class Report:
    """Answers by door and kind, and what must not happen."""

    answers: dict[str, Counter[str]] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    @property
    def num_inputs(self) -> int:
        return sum(counts.total() for counts in self.answers.values())

    def table(self) -> list[str]:
        """Return a line for each door, in Markdown."""
        lines = ["| door | inputs | answers |", "|---|---|---|"]
        for name, counts in self.answers.items():
            kinds = ", ".join(f"{kind} {count}" for kind, count in counts.most_common())
            lines.append(f"| {name} | {counts.total()} | {kinds} |")
        return lines


def run(model: Path, scratch: Path, num_inputs: int, seed: int) -> Report:
    """Put `num_inputs` inputs over all doors, in the proportion of their shares."""
    report = Report()
    with running_service(model, scratch / "log", *FLAGS) as service:
        doors = [*service_doors(service), *file_doors(model, scratch)]
        counts = _shared(num_inputs, doors)
        for door in doors:
            with closing(door) if hasattr(door, "close") else nullcontext():
                _enter(door, seed, counts[door.name], report)
        report.violations += _faults(service)
    report.violations += _logged(scratch / "log")
    return report


def _shared(num_inputs: int, doors: Iterable[Door]) -> dict[str, int]:
    shares = {each.name: each.share for each in doors}
    counts = {name: num_inputs * share // sum(shares.values()) for name, share in shares.items()}
    counts[next(iter(counts))] += num_inputs - sum(counts.values())
    return counts


def _enter(door: Door, seed: int, num_inputs: int, report: Report) -> None:
    counts = report.answers[door.name] = Counter[str]()

    def enter(number: int) -> str:
        try:
            return door.try_number(seed, number)
        except ViolationError as violation:
            report.violations.append(f"{door.name} {number}: {violation}"[:2000])
            print(report.violations[-1], file=sys.stderr, flush=True)
            return "VIOLATION"

    num_threads = NUM_AT_ONCE if door.is_concurrent else 1
    with ThreadPoolExecutor(num_threads) as pool:
        counts.update(pool.map(enter, range(num_inputs)))
    print(f"{door.name}: {dict(counts)}", file=sys.stderr, flush=True)


def _faults(service: RunningService) -> list[str]:
    """Return what the service still holds, or that it has ended."""
    if not service.process.is_running():
        return ["the service has ended"]
    with AdminClient(service.grpc_address) as admin:
        admin.set_speculation(SpeculationChange(reset=True, updated_by="fuzzing"))
    return idle_faults(service.http_url)


def _logged(log: Path) -> list[str]:
    text = log.read_text(errors="replace")
    at = text.find("Traceback")
    return [] if at < 0 else [f"a traceback in the log: {text[at : at + 3000]}"]
