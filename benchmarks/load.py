"""Measure throughput and latency against the number of concurrent streams.

This is a closed loop: a fixed number of streams is open at all times, and a new request starts when
one ends, so prefills interleave with the decode steps of others as in a service. In process and
through Ray and gRPC, in turn.

    python -m benchmarks.load [--concurrency 1 4 16 64] [--output FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np

from benchmarks.contenders import EngineContender, EngineSettings, ServiceContender
from benchmarks.machine import Machine, describe_machine
from benchmarks.methods import METHODS, make_method
from benchmarks.prompts import add_prompts_option, load_prompts
from benchmarks.report_file import add_output, parse_options, write_report, write_text
from benchmarks.rounds import Case, Measured, add_round_options, measure_rounds, warm_up
from benchmarks.service import started_service
from benchmarks.summary import summarize
from benchmarks.worker import Worker
from benchmarks.workloads import MODEL, NO_METHOD, Contender, Measurement, Workload
from cluster.cli.bench.charts import LineChart, draw_charts
from specdec.config.llm import LLMConfig
from specdec.config.quantization import CPU_QUANTIZATION_METHODS
from specdec.models.resolve import resolve
from specdec.text.tokenizer import Tokenizer

_CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
_REQUESTS_EACH = 2
_QUANTIZATIONS = ("none", *CPU_QUANTIZATION_METHODS)


@dataclass(frozen=True)
class Latency:
    """Percentiles over all streams of all rounds, in milliseconds."""

    p50_ms: float
    p95_ms: float
    p99_ms: float


@dataclass(frozen=True)
class LoadRow:
    """One number of streams. first_token: since the request. gap: between messages of a stream.

    tokens_per_s: over all streams, the median of the rounds.
    """

    contender: str
    concurrency: int
    tokens_per_s: float
    slowest: float
    fastest: float
    first_token: Latency
    gap: Latency
    others_percent: float


@dataclass(frozen=True)
class LoadReport:
    """Complete results of a run."""

    command: str
    machine: Machine
    model: str
    quantization: str
    method: str
    num_rounds: int
    max_tokens: int
    rows: tuple[LoadRow, ...]


def make_cases(
    contenders: Sequence[str],
    prompts: Sequence[tuple[int, ...]],
    concurrency: Sequence[int],
    max_tokens: int,
    method: str,
) -> dict[tuple[str, int], Case]:
    """Return the cases by contender and number of streams; prompts repeat as needed."""
    cases = {}
    for count in concurrency:
        repeated = tuple(prompts[i % len(prompts)] for i in range(count * _REQUESTS_EACH))
        workload = Workload(repeated, max_tokens, method, count)
        for contender in contenders:
            cases[contender, count] = Case(f"{contender} {count}", contender, (workload,))
    return cases


def latency(seconds: Sequence[float]) -> Latency:
    """Return the percentiles; zeros for an empty sequence, as the gaps of one-message streams."""
    if not seconds:
        return Latency(0.0, 0.0, 0.0)
    p50, p95, p99 = (1000 * float(each) for each in np.percentile(seconds, (50, 95, 99)))
    return Latency(p50, p95, p99)


def load_row(contender: str, concurrency: int, measured: Sequence[Measurement]) -> LoadRow:
    """Aggregate all rounds of a case."""
    row = summarize("", measured)
    streams = [stream for each in measured for stream in each.streams]
    return LoadRow(
        contender=contender,
        concurrency=concurrency,
        tokens_per_s=row.tokens_per_s,
        slowest=row.slowest,
        fastest=row.fastest,
        first_token=latency([stream.arrivals_s[0] for stream in streams]),
        gap=latency(list(chain.from_iterable(stream.gaps_s for stream in streams))),
        others_percent=row.others_percent,
    )


def charts(report: LoadReport) -> str:
    """Return charts of throughput, and of median and 95th percentile latencies, as SVG."""
    counts = sorted({row.concurrency for row in report.rows})
    found = {(row.contender, row.concurrency): row for row in report.rows}
    names = list(dict.fromkeys(row.contender for row in report.rows))

    def lines(suffix: str, value: str) -> dict[str, list[float]]:
        part, _, name = value.rpartition(".")
        return {
            f"{contender}{suffix}": [
                float(getattr(getattr(row, part) if part else row, name))
                for row in (found[contender, count] for count in counts)
            ]
            for contender in names
        }

    title = f"{report.model}, {report.method} drafting, quantization {report.quantization}"
    panels = (
        ("tokens per second", lines("", "tokens_per_s")),
        (
            "first token, ms",
            lines(", p50", "first_token.p50_ms") | lines(", p95", "first_token.p95_ms"),
        ),
        ("between messages, ms", lines(", p50", "gap.p50_ms") | lines(", p95", "gap.p95_ms")),
    )
    return draw_charts(
        [LineChart(f"{title}: {name}", "open streams", counts, series) for name, series in panels]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return exit status 0."""
    options = parse_options(_parser(), arguments)
    cases, measured = measure(options)
    report = LoadReport(
        command=options.command,
        machine=describe_machine(),
        model=MODEL,
        quantization=options.quantization,
        method=options.method,
        num_rounds=options.rounds,
        max_tokens=options.max_tokens,
        rows=tuple(load_row(*key, measured[case.name]) for key, case in cases.items()),
    )
    for row in report.rows:
        print(
            f"{row.contender:8} {row.concurrency:3} streams {row.tokens_per_s:7.1f} tokens/s, "
            f"first token {row.first_token.p50_ms:6.0f} ms (p95 {row.first_token.p95_ms:.0f}), "
            f"gap {row.gap.p50_ms:6.1f} ms (p95 {row.gap.p95_ms:.1f}), "
            f"other processes {row.others_percent:.0f} %"
        )
    write_report(report, options.output)
    write_text(options.output.with_suffix(".svg"), charts(report))
    return 0


def measure(options: argparse.Namespace) -> tuple[dict[tuple[str, int], Case], Measured]:
    """Load each contender in its own process, and measure in rounds."""
    directory = resolve(MODEL)
    prompts = [each.token_ids for each in load_prompts(options.prompts, Tokenizer(directory))]
    method = make_method(options.method)
    settings = EngineSettings(
        quantization=None if options.quantization == "none" else options.quantization,
        methods=(options.method,),
        num_blocks=2048,
        max_prefill_tokens=LLMConfig().prefill_limit,
    )
    cases = make_cases(
        options.contenders, prompts, options.concurrency, options.max_tokens, options.method
    )
    with ExitStack() as stack:
        contenders: dict[str, Contender] = {}
        if "engine" in options.contenders:
            factory = partial(EngineContender, settings=settings)
            contenders["engine"] = stack.enter_context(Worker(factory, directory))
        if "service" in options.contenders:
            service = stack.enter_context(
                started_service(
                    MODEL,
                    speculative_config=method.config,
                    quantization=options.quantization,
                    enable_prefix_caching=False,
                )
            )
            contenders["service"] = ServiceContender(service.address)
        warm_up(contenders, list(cases.values()))
        measured = measure_rounds(
            contenders, list(cases.values()), options.rounds, options.quiet_limit_s
        )
    return cases, measured


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.load", description="Measure throughput and latency against concurrency."
    )
    parser.add_argument("--concurrency", nargs="+", type=int, default=_CONCURRENCY)
    names = ("engine", "service")
    parser.add_argument("--contenders", nargs="+", choices=names, default=names)
    parser.add_argument("--method", choices=METHODS, default=NO_METHOD)
    parser.add_argument("--quantization", choices=_QUANTIZATIONS, default="none")
    add_prompts_option(parser)
    add_round_options(parser, num_rounds=3)
    add_output(parser, "load")
    return parser


if __name__ == "__main__":
    sys.exit(main())
