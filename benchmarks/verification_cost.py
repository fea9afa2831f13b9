"""Measure a forward pass by its number of rows, and its distance from the memory floor.

Rows are the drafts of one sequence, as in verification, or the same number of sequences; in fp32,
bf16, int8 and w8a8. All shapes take turns. The ratio compares best times with the best time of one
row. The roofline fraction is the time to read the required bytes at the memory bandwidth of the
same run, over the best time of the pass.

    python -m benchmarks.verification_cost [--rounds 20] [--output FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bandwidth import memory_bandwidth, read_bandwidth
from benchmarks.bytes_moved import pass_bytes
from benchmarks.machine import Machine, describe_machine
from benchmarks.report_file import add_output, command_line, write_report, write_text
from benchmarks.step_bench import PRECISIONS, Shape, ShapeTime, StepBench, measure_shapes
from benchmarks.summary import Bar, at_least, at_most, print_bars
from benchmarks.workloads import MODEL
from cluster.cli.charts import LineChart, draw_charts
from specdec.models.resolve import print_progress, resolve

_PRECISIONS = ("fp32", "bf16", "int8", "w8a8")
_PRECISIONS_WITH_LIMIT = ("fp32", "int8")
_NUM_ROWS = (1, 2, 4, 8, 16, 32)
_CONTEXT_TOKENS = 128
_VERIFIED_ROWS, _MOST_RATIO = 8, 1.6
_LEAST_ROOFLINE = 0.75


@dataclass(frozen=True)
class CostRow:
    """One shape in one precision.

    kind: `drafts` of one sequence, or as many `sequences`.
    ratio: to the best one-row time.
    roofline: time to read the required bytes, over the best time.
    """

    precision: str
    kind: str
    num_rows: int
    time: ShapeTime
    ratio: float
    roofline: float
    outside_forward: float


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second of repeated reads of `num_bytes`, the size that a pass reads."""

    precision: str
    num_bytes: int
    bytes_per_s: float


@dataclass(frozen=True)
class VerificationReport:
    """Complete results. memory_bytes_per_s: of a buffer larger than any cache."""

    command: str
    machine: Machine
    model: str
    memory_bytes_per_s: float
    bandwidths: tuple[Bandwidth, ...]
    rows: tuple[CostRow, ...]
    bars: tuple[Bar, ...]


def measure_precision(
    directory: Path, name: str, num_rounds: int, num_rows: Sequence[int]
) -> tuple[Bandwidth, tuple[CostRow, ...]]:
    """Load the model in one precision, and measure all shapes."""
    length = _CONTEXT_TOKENS + max(num_rows)
    bench = StepBench(directory, PRECISIONS[name], max(num_rows), length)
    for seq_id in range(max(num_rows)):
        bench.extend(seq_id, _CONTEXT_TOKENS)
    shapes = [Shape(1, count - 1) for count in num_rows]
    shapes += [Shape(count) for count in num_rows if count > 1]
    num_bytes = pass_bytes(bench.model_config, name, 1, _CONTEXT_TOKENS)
    bandwidth = Bandwidth(name, num_bytes, read_bandwidth(num_bytes))
    times = measure_shapes(bench, shapes, num_rounds, name)
    one_row_ms = next(each.best_ms for each in times if each.shape.num_rows == 1)
    rows = tuple(
        _row(
            name,
            each,
            one_row_ms,
            1000
            * pass_bytes(bench.model_config, name, each.shape.num_seqs, _CONTEXT_TOKENS)
            / bandwidth.bytes_per_s,
        )
        for each in times
    )
    return bandwidth, rows


def _row(precision: str, time: ShapeTime, one_row_ms: float, floor_ms: float) -> CostRow:
    return CostRow(
        precision=precision,
        kind="sequences" if time.shape.num_seqs > 1 else "drafts",
        num_rows=time.shape.num_rows,
        time=time,
        ratio=time.best_ms / one_row_ms,
        roofline=floor_ms / time.best_ms,
        outside_forward=time.outside_forward,
    )


def bars(rows: Sequence[CostRow]) -> tuple[Bar, ...]:
    """Check 8-row verification in fp32 and int8, and fp32's single row against the memory floor."""
    found = []
    for row in rows:
        if (
            row.kind == "drafts"
            and row.num_rows == _VERIFIED_ROWS
            and row.precision in _PRECISIONS_WITH_LIMIT
        ):
            name = f"{row.precision}, {row.num_rows} rows over one row"
            found.append(at_most(name, row.ratio, _MOST_RATIO))
        if row.num_rows == 1 and row.precision == "fp32":
            found.append(at_least("fp32, of the memory floor", row.roofline, _LEAST_ROOFLINE))
    return tuple(found)


def charts(report: VerificationReport) -> str:
    """Return charts of milliseconds and ratios by rows, as SVG."""
    counts = sorted({row.num_rows for row in report.rows})
    series: dict[str, dict[int, CostRow]] = {}
    for row in report.rows:
        kinds = ("drafts", "sequences") if row.num_rows == 1 else (row.kind,)
        for kind in kinds:
            series.setdefault(f"{row.precision}, {kind}", {})[row.num_rows] = row
    milliseconds = {
        name: [each[count].time.best_ms for count in counts] for name, each in series.items()
    }
    ratios = {name: [each[count].ratio for count in counts] for name, each in series.items()}
    title = f"{report.model}: a step by its number of rows"
    return draw_charts(
        [
            LineChart(f"{title}, best of all rounds, ms", "rows", counts, milliseconds),
            LineChart(f"{title}, over one row", "rows", counts, ratios),
        ]
    )


def print_report(report: VerificationReport) -> None:
    """Print bandwidths, rows and limits."""
    print(f"memory bandwidth {report.memory_bytes_per_s / 1e9:.1f} GB/s")
    for each in report.bandwidths:
        print(
            f"{each.precision}: a pass reads {each.num_bytes / 1e6:.0f} MB, at "
            f"{each.bytes_per_s / 1e9:.1f} GB/s: {1000 * each.num_bytes / each.bytes_per_s:.1f} ms"
        )
    for row in report.rows:
        print(
            f"{row.precision:5} {row.num_rows:3} rows of {row.kind:10}"
            f"{row.time.best_ms:8.1f} ms (median {row.time.median_ms:.1f}), "
            f"{row.ratio:5.2f} x one row, {row.roofline:4.0%} of the floor, "
            f"{row.outside_forward:4.0%} outside the model"
        )
    print_bars(report.bars)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return 0 whether or not the aims are met: machines differ."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser().parse_args(given)
    directory = resolve(MODEL)
    print_progress("measuring the memory bandwidth")
    memory = memory_bandwidth()
    measured = [
        measure_precision(directory, name, options.rounds, options.num_rows)
        for name in options.precisions
    ]
    rows = tuple(row for _, own in measured for row in own)
    report = VerificationReport(
        command=command_line("benchmarks.verification_cost", given),
        machine=describe_machine(),
        model=MODEL,
        memory_bytes_per_s=memory,
        bandwidths=tuple(bandwidth for bandwidth, _ in measured),
        rows=rows,
        bars=bars(rows),
    )
    print_report(report)
    write_text(options.output.with_suffix(".svg"), charts(report))
    write_report(report, options.output)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.verification_cost", description="Measure a pass by its rows."
    )
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=_PRECISIONS)
    parser.add_argument("--num-rows", nargs="+", type=int, default=_NUM_ROWS)
    parser.add_argument("--rounds", type=int, default=20)
    add_output(parser, "verification-cost")
    return parser


if __name__ == "__main__":
    sys.exit(main())
