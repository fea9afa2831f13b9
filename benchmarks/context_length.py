"""Measure a decode step and a verification of 8 rows against the context length.

One sequence grows from one length to the next, so all figures use the same KV.

    python -m benchmarks.context_length [--lengths 128 512 2048 8000] [--output FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tqdm import tqdm

from benchmarks.bandwidth import read_bandwidth
from benchmarks.bytes_moved import pass_bytes
from benchmarks.machine import Machine, describe_machine
from benchmarks.report_file import add_output, command_line, write_report, write_text
from benchmarks.step_bench import PRECISIONS, Shape, ShapeTime, StepBench, measure_shapes
from benchmarks.workloads import MODEL
from cluster.cli.charts import LineChart, draw_charts
from specdec.models.config.model_config import ModelConfig
from specdec.models.resolve import resolve
from specdec.types.errors import InvalidValueError

_LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8000)
_NUM_DRAFTS = 7


@dataclass(frozen=True)
class LengthRow:
    """Times at one context length. floor_ms: time to read the weights and KV from memory."""

    num_tokens: int
    decode: ShapeTime
    verification: ShapeTime
    floor_ms: float


@dataclass(frozen=True)
class ContextReport:
    """Complete results of a run."""

    command: str
    machine: Machine
    model: str
    precision: str
    rows: tuple[LengthRow, ...]


def measure(
    bench: StepBench, precision: str, lengths: Sequence[int], num_rounds: int
) -> tuple[LengthRow, ...]:
    """Grow the sequence of `bench` and measure at each length, in ascending order."""
    rows = []
    shapes = [Shape(1), Shape(1, _NUM_DRAFTS)]
    for length in tqdm(sorted(lengths), "lengths", leave=False):
        bench.extend(0, length)
        decode, verification = measure_shapes(bench, shapes, num_rounds, f"{length} tokens")
        num_bytes = pass_bytes(bench.model_config, precision, 1, length)
        floor_ms = 1000 * num_bytes / read_bandwidth(num_bytes)
        rows.append(LengthRow(length, decode, verification, floor_ms))
    return tuple(rows)


def chart(report: ContextReport) -> str:
    """Return a chart of milliseconds by context length, as SVG."""
    series = {
        "decode": [row.decode.best_ms for row in report.rows],
        f"{_NUM_DRAFTS + 1} rows": [row.verification.best_ms for row in report.rows],
        "memory floor": [row.floor_ms for row in report.rows],
    }
    lengths = [row.num_tokens for row in report.rows]
    title = f"{report.model}, {report.precision}: a step by context, best of all rounds, ms"
    return draw_charts([LineChart(title, "tokens of context", lengths, series)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return 0. Raises InvalidValueError for a length beyond the model's."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser().parse_args(given)
    directory = resolve(MODEL)
    most = ModelConfig.from_directory(directory).max_position_embeddings - _NUM_DRAFTS - 1
    if not 1 <= min(options.lengths) <= max(options.lengths) <= most:
        raise InvalidValueError("lengths", options.lengths, f"from 1 to {most}")
    room = max(options.lengths) + _NUM_DRAFTS + 1
    bench = StepBench(directory, PRECISIONS[options.precision], 1, room)
    report = ContextReport(
        command=command_line("benchmarks.context_length", given),
        machine=describe_machine(),
        model=MODEL,
        precision=options.precision,
        rows=measure(bench, options.precision, options.lengths, options.rounds),
    )
    for row in report.rows:
        print(
            f"{row.num_tokens:5} tokens: decode {row.decode.best_ms:6.1f} ms, "
            f"{_NUM_DRAFTS + 1} rows {row.verification.best_ms:6.1f} ms, "
            f"memory floor {row.floor_ms:.1f} ms"
        )
    write_text(options.output.with_suffix(".svg"), chart(report))
    write_report(report, options.output)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.context_length", description="Measure a step by its context."
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=_LENGTHS)
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--rounds", type=int, default=10)
    add_output(parser, "context-length")
    return parser


if __name__ == "__main__":
    sys.exit(main())
