"""Measure collectives between tensor-parallel ranks of one node: shared memory against Gloo.

Each rank is a process with one thread. A round performs the collectives of one forward pass of
SmolLM2 (60 all-reduces) or of sampling (20 small all-gathers). Both implementations take turns; a
figure is the median over the rounds. The last line printed is JSON.

    python -m benchmarks.collectives [--ranks 2] [--rounds 30] [--output FILE]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.bystanders import CpuUsage, wait_until_quiet
from benchmarks.machine import Machine, describe_machine
from benchmarks.report_file import add_output, write_report
from specdec.kernels.collectives import Collectives, ProcessGroupCollectives
from specdec.kernels.cpu import SharedMemory, native_library

_TIMEOUT_S = 60.0
_QUIET_LIMIT_S = 120.0
_HIDDEN_SIZE = 576

Work = Callable[[Collectives], None]
Times = dict[str, list[float]]
"""Seconds of each round, by implementation."""


@dataclass(frozen=True)
class Row:
    """Median and range of one case."""

    case: str
    shared_memory_ms: float
    shared_memory_range_ms: tuple[float, float]
    gloo_ms: float
    gloo_range_ms: tuple[float, float]


@dataclass(frozen=True)
class Report:
    """JSON report. others_percent: CPU usage of other processes, in percent of one core."""

    machine: Machine
    num_ranks: int
    others_percent: float
    rows: tuple[Row, ...]


def sums(num_rows: int, count: int = 60) -> Work:
    """Return work that all-reduces [num_rows, 576] floats `count` times."""
    tensor = torch.zeros(num_rows, _HIDDEN_SIZE)

    def work(collectives: Collectives) -> None:
        for _ in range(count):
            collectives.all_reduce(tensor)

    return work


def gathers(num_rows: int, count: int = 20) -> Work:
    """Return work that all-gathers one (score, token id) pair per row `count` times."""
    pairs = torch.zeros(num_rows, 2, dtype=torch.float64)

    def work(collectives: Collectives) -> None:
        for _ in range(count):
            collectives.all_gather(pairs)

    return work


CASES: Mapping[str, Work] = {
    "60 sums of 1 row": sums(1),
    "60 sums of 8 rows": sums(8),
    "60 sums of 64 rows": sums(64),
    "60 sums of 512 rows": sums(512),
    "20 gathers of 16 pairs": gathers(16),
}


def measure(work: Work, ways: Mapping[str, Collectives], rounds: int) -> Times:
    """Return the seconds of each round. All ranks call this; each round starts with a barrier."""
    times: Times = {way: [] for way in ways}
    for index in range(rounds + 1):
        for way, collectives in ways.items():
            collectives.all_reduce(torch.zeros(1))
            began_at = time.perf_counter()
            work(collectives)
            if index:  # the first round is a warm-up
                times[way].append(time.perf_counter() - began_at)
    return times


def run_rank(
    rank: int, size: int, directory: Path, rounds: int, to_parent: Connection, may_end: Event
) -> None:
    """Run one rank in its own process. Rank 0 sends the times of each case, in order."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    library = native_library()
    assert library is not None, "no C++ compiler"
    dist.init_process_group(
        "gloo", init_method=f"file://{directory / 'gloo'}", rank=rank, world_size=size
    )
    assert dist.group.WORLD is not None
    ways: dict[str, Collectives] = {
        "shared memory": SharedMemory(library, rank, size, directory / "shared", _TIMEOUT_S),
        "gloo": ProcessGroupCollectives(dist.group.WORLD, "Gloo"),
    }
    for work in CASES.values():
        times = measure(work, ways, rounds)
        if rank == 0:
            to_parent.send(times)
    may_end.wait()
    dist.destroy_process_group()


def measure_all(num_ranks: int, rounds: int) -> tuple[tuple[Row, ...], float]:
    """Start the ranks; return the rows and the CPU usage of other processes in percent of a core.

    Raises RuntimeError if a rank fails.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    may_end, before = context.Event(), CpuUsage.now()
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as directory:
        ranks = [
            context.Process(
                target=run_rank, args=(rank, num_ranks, Path(directory), rounds, sender, may_end)
            )
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        sender.close()
        try:
            rows = tuple(_row(case, receiver.recv()) for case in CASES)
            return rows, CpuUsage.now().others_percent_since(before)  # while the ranks are alive
        except EOFError:
            raise RuntimeError("a rank ended before the last measurement") from None
        finally:
            may_end.set()
            for process in ranks:
                process.join()


def _row(case: str, times: Times) -> Row:
    shared, gloo = ([1e3 * each for each in times[way]] for way in ("shared memory", "gloo"))
    return Row(
        case,
        statistics.median(shared),
        (min(shared), max(shared)),
        statistics.median(gloo),
        (min(gloo), max(gloo)),
    )


def print_table(report: Report) -> None:
    """Print the medians, and the speedup of shared memory over Gloo."""
    print(f"{'':24} {'shared memory':>14} {'Gloo':>10} {'ratio':>7}")
    for row in report.rows:
        ratio = row.gloo_ms / row.shared_memory_ms
        print(f"{row.case:24} {row.shared_memory_ms:11.2f} ms {row.gloo_ms:7.2f} ms {ratio:7.1f}")
    print(f"other processes used {report.others_percent:.0f} % of a core")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    options = _parser().parse_args(arguments)
    native_library()  # compile before the measurement
    wait_until_quiet(_QUIET_LIMIT_S)
    rows, others_percent = measure_all(options.ranks, options.rounds)
    report = Report(describe_machine(), options.ranks, others_percent, rows)
    print_table(report)
    write_report(report, options.output)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.collectives", description="Measure collectives between ranks of one node."
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    add_output(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
