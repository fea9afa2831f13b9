"""Measure what draft heads and trees cost beside a step of their target, on native CPU kernels.

One stream of SmolLM2 behind 128 tokens, with heads of its sizes, a draft vocabulary of 8192 and
random weights, in float32 (16-bit weights) and int8. A target's step is a forward pass of one row
with its logits and their argmax. A tree of 16 drafts is compared with a chain of 16 instead, in
whole steps. A share is the median over the rounds of (time of the case / time of its reference in
that round). The last line printed is JSON.

Each round runs all cases in a new random order. A step of the target that is not timed comes before
each of them, as before a draft in a service: what the case before has left in the caches does not
count. The models are loaded several times, in a new order too, since a draft's time depends on the
place of its weights in memory.

    python -m benchmarks.heads [--threads 2] [--rounds 60] [--loads 3] [--seed 0] [--cpu-time]
        [--output FILE]

Use --cpu-time with one thread on a shared machine to measure CPU time instead of wall time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.bystanders import CpuUsage
from benchmarks.cpu_time import add_cpu_time, require_one_thread
from benchmarks.head_cases import TARGET, HeadBench, HeadCase, write_heads
from benchmarks.machine import Machine, describe_machine
from benchmarks.report_file import add_output, command_line, write_report
from benchmarks.step_bench import PRECISIONS
from benchmarks.summary import Bar, at_most, print_bars
from benchmarks.workloads import MODEL
from specdec.models.config.model_config import ModelConfig
from specdec.models.resolve import print_progress, resolve

_PRECISIONS = ("fp32", "int8")
_NUM_WARM_UP = 3

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


@dataclass(frozen=True)
class TimedCase:
    """Seconds of a case in each round. reference: the case whose time is the unit."""

    reference: str
    seconds: list[float] = field(default_factory=list)


def measure(
    cases: Mapping[str, HeadCase],
    rounds: int,
    clock: Callable[[], float],
    order: random.Random,
    timed: dict[str, TimedCase],
) -> None:
    """Run all cases in each round, and add their seconds to `timed`, by name; order: of cases.

    The first rounds do not count.
    """
    for name, case in cases.items():
        timed.setdefault(name, TimedCase(case.reference))
    for index in range(_NUM_WARM_UP + rounds):
        for name in order.sample(list(cases), len(cases)):
            case = cases[name]
            cases[TARGET].run()
            began_at = clock()
            case.run()
            seconds = (clock() - began_at) / case.num_repeats
            if index >= _NUM_WARM_UP:
                timed[name].seconds.append(seconds)


def summarize(precision: str, timed: Mapping[str, TimedCase]) -> list[HeadRow]:
    """Return the medians of all cases, by name."""
    return [
        HeadRow(
            precision,
            name,
            each.reference,
            1e3 * statistics.median(each.seconds),
            _median_ratio(each.seconds, timed[each.reference].seconds),
        )
        for name, each in timed.items()
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
    before = CpuUsage.now()
    rows = measure_loads(options, resolve(MODEL, progress=print_progress))
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


def measure_loads(options: argparse.Namespace, target: Path) -> list[HeadRow]:
    """Load the models several times, and return the medians over the rounds of all loads."""
    clock = time.thread_time if options.cpu_time else time.perf_counter
    order, rounds = random.Random(options.seed), -(-options.rounds // options.loads)
    timed: dict[str, dict[str, TimedCase]] = {precision: {} for precision in _PRECISIONS}
    with TemporaryDirectory() as heads, torch.inference_mode():
        write_heads(Path(heads), ModelConfig.from_directory(target))
        for _ in range(options.loads):
            for precision in order.sample(_PRECISIONS, len(_PRECISIONS)):
                bench = HeadBench(target, Path(heads), PRECISIONS[precision], order)
                measure(bench.cases(), rounds, clock, order, timed[precision])
    return [row for precision, each in timed.items() for row in summarize(precision, each)]


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
    parser.add_argument("--rounds", type=int, default=60, help="over all loads")
    parser.add_argument("--loads", type=int, default=3, help="how often the models are loaded")
    parser.add_argument("--seed", type=int, default=0, help="of the order of cases and loads")
    add_cpu_time(parser)
    add_output(parser, "heads")
    options = parser.parse_args(arguments)
    require_one_thread(parser, options)
    if not 1 <= options.loads <= options.rounds:
        parser.error("--loads must be at least 1 and at most --rounds")
    return options


if __name__ == "__main__":
    sys.exit(main())
