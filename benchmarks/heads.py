"""Measure what draft heads and trees cost beside a step of their target, on native CPU kernels.

One stream of SmolLM2 behind 128 tokens, with heads of its sizes, a draft vocabulary of 8192 and
random weights, in float32 (16-bit weights) and int8. A target's step is a forward pass of one row
with its logits and their argmax. A tree of 16 drafts is compared with a chain of 16 instead, in
whole steps. All cases take turns; a share is the median over the rounds of (time of the case / time
of its reference in that round). The last line printed is JSON.

    python -m benchmarks.heads [--threads 2] [--rounds 60] [--cpu-time] [--output FILE]

Use --cpu-time with one thread on a shared machine to measure CPU time instead of wall time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.bystanders import CpuUsage
from benchmarks.head_cases import HeadBench, HeadCase, write_heads
from benchmarks.machine import Machine, describe_machine
from benchmarks.report_file import add_output, command_line, write_report
from benchmarks.step_bench import PRECISIONS
from benchmarks.summary import Bar, at_most, print_bars
from benchmarks.workloads import MODEL
from specdec.models.config import ModelConfig
from specdec.models.resolve import print_progress, resolve

_PRECISIONS = ("fp32", "int8")

_LIMITS = {
    "eagle3 draft token": {"fp32": 0.08, "int8": 0.12},
    "dspark, block of 7": {"fp32": 0.25, "int8": 0.25},
    "dspark, block of 7 in int8": {"fp32": 0.25},
    "medusa, 5 heads": {"fp32": 0.12, "int8": 0.12},
    "medusa, 5 heads in int8": {"fp32": 0.12},
    "medusa, 5 heads, one output head": {"fp32": 0.12, "int8": 0.12},
    "medusa, 5 heads, half of the tokens": {"fp32": 0.12, "int8": 0.12},
    "tree of 16 behind 128": {"fp32": 1.1, "int8": 1.1},
    "tree of 16 behind 1000": {"fp32": 1.1, "int8": 1.1},
}
"""Most time of a case and precision, as a share of its reference."""


@dataclass(frozen=True)
class HeadRow:
    """Medians of one case. share: of the time of `reference`."""

    precision: str
    case: str
    reference: str
    ms: float
    share: float


@dataclass(frozen=True)
class Report:
    """JSON report. others_percent: CPU usage of other processes, in percent of one core."""

    command: str
    machine: Machine
    model: str
    num_threads: int
    is_cpu_time: bool
    others_percent: float
    rows: tuple[HeadRow, ...]
    bars: tuple[Bar, ...]


def measure(
    precision: str,
    cases: Mapping[str, HeadCase],
    rounds: int,
    clock: Callable[[], float],
) -> list[HeadRow]:
    """Return the medians of all cases, which take turns, without the first rounds."""
    num_warm_up = 3
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(num_warm_up + rounds):
        for name, case in cases.items():
            began_at = clock()
            case.run()
            seconds[name].append((clock() - began_at) / case.num_repeats)
    own = {name: each[num_warm_up:] for name, each in seconds.items()}
    return [
        HeadRow(
            precision,
            name,
            case.reference,
            1e3 * statistics.median(own[name]),
            _median_ratio(own[name], own[case.reference]),
        )
        for name, case in cases.items()
    ]


def _median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def bars(rows: Sequence[HeadRow]) -> tuple[Bar, ...]:
    """Return the shares that have a limit."""
    return tuple(
        at_most(f"{row.case} / {row.reference}, {row.precision}", row.share, limit)
        for row in rows
        if (limit := _LIMITS.get(row.case, {}).get(row.precision)) is not None
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table, the bars and one line of JSON; return exit status 0."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = _options(given)
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.cpu_time else time.perf_counter
    before, rows = CpuUsage.now(), list[HeadRow]()
    target = resolve(MODEL, progress=print_progress)
    with TemporaryDirectory() as heads, torch.inference_mode():
        write_heads(Path(heads), ModelConfig.from_directory(target))
        for precision in _PRECISIONS:
            bench = HeadBench(target, Path(heads), PRECISIONS[precision])
            rows += measure(precision, bench.cases(), options.rounds, clock)
    print_table(rows)
    print_bars(bars(rows))
    report = Report(
        command_line("benchmarks.heads", given),
        describe_machine(),
        MODEL,
        options.threads,
        options.cpu_time,
        CpuUsage.now().others_percent_since(before),
        tuple(rows),
        bars(rows),
    )
    write_report(report, options.output)
    return 0


def print_table(rows: Sequence[HeadRow]) -> None:
    """Print one line per case, with its limit."""
    for row in rows:
        limit = _LIMITS.get(row.case, {}).get(row.precision)
        bound = "" if limit is None else f", at most {100 * limit:g} %"
        share = f"{100 * row.share:6.1f} % of {row.reference}{bound}"
        print(f"{row.precision:6}{row.case:40}{row.ms:8.3f} ms{share}")


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.heads", description="Measure draft heads beside their target."
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time of one thread")
    add_output(parser, "heads")
    options = parser.parse_args(arguments)
    if options.cpu_time and options.threads != 1:
        parser.error("--cpu-time needs --threads 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
