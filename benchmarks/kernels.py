"""Measure the matrix products of a model: native kernels compared with torch.

A pass multiplies a number of rows by each matrix of SmolLM2-135M, output head included, with random
weights. Passes of all contenders take turns, in a random order each round; a figure is the median
of the rounds. The floor is the time to read a contender's weights at the bandwidth measured between
the passes. With one thread CPU time is measured, which other processes hardly affect; with several
threads wall time.

    python -m benchmarks.kernels [--rows 1 8 ...] [--rounds 15] [--threads 1 2] [--layers 30]
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks.bystanders import CpuUsage, wait_until_quiet
from benchmarks.machine import Machine, describe_machine, num_usable_cores
from benchmarks.matrix_contenders import CONTENDERS, Shape
from benchmarks.report_file import add_output, write_report
from specdec.models.resolve import print_progress

_LAYER: tuple[Shape, ...] = ((960, 576), (576, 576), (3072, 576), (576, 1536))
"""[out_features, in_features] of QKV, attention output, gate and up, down."""

_HEAD: Shape = (49152, 576)
_NUM_LAYERS = 30

_ROWS = (1, 2, 4, 8, 16, 32, 256)
_FEW_ROWS = 32
_QUIET_LIMIT_S = 120.0


@dataclass(frozen=True)
class Figure:
    """Times of one contender over all matrices. floor_ms: time to read its weights."""

    contender: str
    num_threads: int
    rows: int
    median_ms: float
    fastest_ms: float
    floor_ms: float


@dataclass(frozen=True)
class Report:
    """Complete results. others_percent: CPU usage of other processes, in percent of one core."""

    machine: Machine
    num_layers: int
    others_percent: float
    figures: tuple[Figure, ...]


def measure(
    shapes: Sequence[Shape], rows: int, num_rounds: int, names: Sequence[str], num_threads: int
) -> tuple[Figure, ...]:
    """Return one figure per contender."""
    torch.set_num_threads(num_threads)
    passes = {name: CONTENDERS[name](shapes, rows) for name in names}
    memory = torch.ones(2**27, device="cpu")  # 512 MiB, the size of the model in float32
    runs: dict[str, Callable[[], object]] = {
        "": memory.sum,
        **{name: each.run for name, each in passes.items()},
    }
    seconds = _alternate(
        runs, num_rounds, time.thread_time if num_threads == 1 else time.perf_counter
    )
    s_per_byte = min(seconds[""]) / memory.nbytes
    return tuple(
        Figure(
            contender=name,
            num_threads=num_threads,
            rows=rows,
            median_ms=1000 * statistics.median(seconds[name]),
            fastest_ms=1000 * min(seconds[name]),
            floor_ms=1000 * s_per_byte * passes[name].weight_bytes,
        )
        for name in names
    )


def _alternate(
    runs: Mapping[str, Callable[[], object]], num_rounds: int, clock: Callable[[], float]
) -> Mapping[str, Sequence[float]]:
    """Return the seconds of each round by name, after a warm-up round."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(num_rounds + 1):
        for name in random.sample(list(runs), len(runs)):
            started_at = clock()
            runs[name]()
            if index > 0:
                seconds[name].append(clock() - started_at)
    return seconds


def print_table(report: Report) -> None:
    """Print the medians in milliseconds, one contender per line, followed by the floor."""
    for num_threads in sorted({figure.num_threads for figure in report.figures}):
        figures = [figure for figure in report.figures if figure.num_threads == num_threads]
        rows = sorted({figure.rows for figure in figures})
        title = f"ms, {num_threads} threads, by rows"
        print(f"{title:28}" + "".join(f"{each:>8}" for each in rows) + f"{'floor':>8}")
        for name in dict.fromkeys(figure.contender for figure in figures):
            own = {figure.rows: figure for figure in figures if figure.contender == name}
            medians = "".join(f"{own[each].median_ms:8.1f}" for each in rows)
            floor_ms = min(figure.floor_ms for figure in own.values())
            print(f"{name:28}{medians}{floor_ms:8.1f}")
    print(f"other processes used {report.others_percent:.0f} % of a core")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return exit status 0; no figure is enforced."""
    options = _parser().parse_args(arguments)
    wait_until_quiet(_QUIET_LIMIT_S)
    before = CpuUsage.now()
    figures: list[Figure] = []
    shapes = [*_LAYER * options.layers, _HEAD]
    for num_threads, rows in itertools.product(options.threads, options.rows):
        print_progress(f"measuring {rows} rows, threads: {num_threads}")
        rounds = options.rounds if rows <= _FEW_ROWS else -(-options.rounds // 3)
        with torch.inference_mode():
            figures += measure(shapes, rows, rounds, options.contenders, num_threads)
    others_percent = CpuUsage.now().others_percent_since(before)
    report = Report(describe_machine(), options.layers, others_percent, tuple(figures))
    print_table(report)
    write_report(report, options.output)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.kernels", description="Measure the matrix products of a model."
    )
    parser.add_argument("--rows", type=int, nargs="+", default=_ROWS)
    parser.add_argument(
        "--layers", type=int, default=_NUM_LAYERS, help="30 layers take 8 GB of memory"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=(1, num_usable_cores()))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=tuple(CONTENDERS))
    add_output(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
