"""Measure a step on several tensor-parallel ranks against the same step in one process.

Both use the same cores: the single process has one thread per core, each rank has one thread. Ranks
communicate over shared memory, and over Gloo for comparison. Idle threads yield their cores as
early as those of a service. The three take turns, and a ratio is the median of the ratios of the
rounds. A step takes as long as its slowest rank.

    python -m benchmarks.tensor_parallel [--ranks 2] [--rounds 30] [--output FILE]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from benchmarks.bystanders import CpuUsage, wait_until_quiet
from benchmarks.machine import Machine, describe_machine, num_usable_cores
from benchmarks.report_file import add_output, command_line, write_report
from benchmarks.step_bench import PRECISIONS, Shape, StepBench
from benchmarks.summary import Bar, at_most, print_bars
from benchmarks.workloads import MODEL
from cluster.workers.groups.ranks import BRIEF_SPINNING
from specdec.kernels.collectives import ProcessGroupCollectives
from specdec.kernels.cpu import native_library
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.resolve import resolve
from specdec.worker import Rendezvous

_SHAPES = (Shape(1), Shape(1, 7), Shape(16), Shape(16, 3))
_CONTEXT_TOKENS = 128
_TIMEOUT = timedelta(minutes=5)
_QUIET_LIMIT_S = 120.0
_MOST_RATIO = 1.15

ONE_PROCESS, SHARED_MEMORY, GLOO = "one process", "shared memory", "Gloo"

Times = Mapping[str, Sequence[float]]
"""Seconds of each round, by contender."""


@dataclass(frozen=True)
class StepRatio:
    """Step of one shape: medians in ms, and the ratios of ranks to one process."""

    precision: str
    num_rows: int
    num_seqs: int
    median_ms: Mapping[str, float]
    ratio: Mapping[str, float]


@dataclass(frozen=True)
class TensorParallelReport:
    """Complete results. others_percent: maximum CPU usage of other processes, of one core."""

    command: str
    machine: Machine
    model: str
    num_ranks: int
    others_percent: float
    steps: tuple[StepRatio, ...]
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class RankSpec:
    """One rank of one contender."""

    rank: int
    size: int
    way: str
    precision: str
    num_threads: int
    rendezvous: Path
    model: Path


def run_rank(spec: RankSpec, parent: Connection) -> None:
    """Load one rank in its own process, and measure each received shape until None."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    longest = _CONTEXT_TOKENS + max(shape.num_drafts for shape in _SHAPES) + 1
    num_seqs = max(shape.num_seqs for shape in _SHAPES)
    bench = StepBench(
        spec.model, PRECISIONS[spec.precision], num_seqs, longest, _join(spec), spec.num_threads
    )
    for seq_id in range(num_seqs):
        bench.extend(seq_id, _CONTEXT_TOKENS)
    parent.send(None)
    while (shape := parent.recv()) is not None:
        parent.send(bench.measure(shape.num_seqs, shape.num_drafts).step_s)


def _join(spec: RankSpec) -> TensorParallelGroup:
    if spec.way != GLOO:
        return Rendezvous(spec.rank, spec.size, "cpu", spec.rendezvous, _TIMEOUT).join()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{spec.rendezvous / 'gloo'}",
        rank=spec.rank,
        world_size=spec.size,
    )
    assert dist.group.WORLD is not None
    collectives = ProcessGroupCollectives(dist.group.WORLD, "Gloo")
    return TensorParallelGroup(spec.rank, spec.size, collectives)


class Contender:
    """Ranks of one contender, each a process."""

    def __init__(self, ranks: Sequence[Connection]) -> None:
        self._ranks = ranks

    def measure(self, shape: Shape) -> float:
        """Return the seconds of one step. Raises EOFError if a rank has ended."""
        for rank in self._ranks:
            rank.send(shape)
        return max(float(rank.recv()) for rank in self._ranks)


@contextmanager
def contender(way: str, size: int, num_threads: int, precision: str) -> Iterator[Contender]:
    """Start the ranks, and stop them at the end of the context."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as directory:
        processes, connections = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            spec = RankSpec(
                rank, size, way, precision, num_threads, Path(directory), resolve(MODEL)
            )
            process = context.Process(target=run_rank, args=(spec, theirs))
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        try:
            for connection in connections:
                connection.recv()
            yield Contender(connections)
        finally:
            for connection in connections:
                connection.send(None)
            for process in processes:
                process.join()


def measure_precision(precision: str, size: int, rounds: int) -> tuple[list[StepRatio], float]:
    """Measure all shapes in turns; return also the CPU usage of other processes in percent."""
    with ExitStack() as stack:
        contenders = {
            way: stack.enter_context(contender(way, of_way, threads, precision))
            for way, of_way, threads in (
                (ONE_PROCESS, 1, num_usable_cores()),
                (SHARED_MEMORY, size, max(1, num_usable_cores() // size)),
                (GLOO, size, max(1, num_usable_cores() // size)),
            )
        }
        wait_until_quiet(_QUIET_LIMIT_S)
        found, before = [], CpuUsage.now()
        for shape in tqdm(_SHAPES, precision, leave=False):
            times: dict[str, list[float]] = {way: [] for way in contenders}
            for index in range(rounds + 1):
                for way, each in contenders.items():
                    seconds = each.measure(shape)
                    if index:  # the first round is a warm-up
                        times[way].append(seconds)
            found.append(step_ratio(precision, shape, times))
        return found, CpuUsage.now().others_percent_since(before)  # while the ranks are alive


def step_ratio(precision: str, shape: Shape, times: Times) -> StepRatio:
    """Return the medians, and the median ratio of the rounds to the single process."""
    alone = times[ONE_PROCESS]
    return StepRatio(
        precision=precision,
        num_rows=shape.num_rows,
        num_seqs=shape.num_seqs,
        median_ms={way: 1000 * statistics.median(each) for way, each in times.items()},
        ratio={
            way: statistics.median(map(float.__truediv__, each, alone))
            for way, each in times.items()
            if way != ONE_PROCESS
        },
    )


def bars(steps: Sequence[StepRatio]) -> tuple[Bar, ...]:
    """Check each step on ranks with shared memory against the single process."""
    return tuple(
        at_most(
            f"{each.precision}, {each.num_rows} rows of {each.num_seqs}, ranks over one process",
            each.ratio[SHARED_MEMORY],
            _MOST_RATIO,
        )
        for each in steps
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return 0 whether or not the aims are met: machines differ."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser().parse_args(given)
    native_library()  # compile before the measurement
    os.environ.update(BRIEF_SPINNING)  # otherwise one contender's idle threads delay the next
    torch.set_num_threads(1)
    measured = [
        measure_precision(precision, options.ranks, options.rounds)
        for precision in options.precisions
    ]
    steps = [step for found, _ in measured for step in found]
    report = TensorParallelReport(
        command=command_line("benchmarks.tensor_parallel", given),
        machine=describe_machine(),
        model=MODEL,
        num_ranks=options.ranks,
        others_percent=max(percent for _, percent in measured),
        steps=tuple(steps),
        bars=bars(steps),
    )
    _print_table(report)
    write_report(report, options.output)
    return 0


def _print_table(report: TensorParallelReport) -> None:
    for each in report.steps:
        times = ", ".join(f"{way} {ms:.1f} ms" for way, ms in each.median_ms.items())
        ratios = ", ".join(f"{way} {ratio:.2f}" for way, ratio in each.ratio.items())
        print(f"{each.precision:5} {each.num_rows:3} rows of {each.num_seqs:2}: {times}; {ratios}")
    print_bars(report.bars)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.tensor_parallel", description="Measure steps on several ranks."
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=("fp32", "int8"))
    add_output(parser, "tensor-parallel")
    return parser


if __name__ == "__main__":
    sys.exit(main())
