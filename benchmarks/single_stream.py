"""Measure one stream by suite and method: tokens per second, and the ratio to no speculation.

The engine runs in process, and all methods share one copy of the model. They take turns on the same
prompt; each round uses another prompt of the suite, so `--rounds` is the number of prompts.

    python -m benchmarks.single_stream [--quantization int8] [--output FILE]
    python -m benchmarks.single_stream --prompts question.jsonl [--temperature 1]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.contenders import EngineContender, EngineSettings
from benchmarks.machine import Machine, describe_machine
from benchmarks.methods import METHODS, NUM_SPECULATIVE_TOKENS
from benchmarks.prompts import add_prompts_option, by_suite, load_prompts
from benchmarks.report_file import add_output, parse_options, write_report, write_text
from benchmarks.rounds import Case, add_round_options, measure_rounds, warm_up
from benchmarks.summary import (
    Comparison,
    Ratio,
    Row,
    compare_all,
    compare_cases,
    num_other_outputs,
    print_ratios,
    print_rows,
    summarize,
)
from benchmarks.worker import Worker
from benchmarks.workloads import MODEL, NO_METHOD, Contender, one_by_one
from cluster.cli.bench.charts import BarChart, draw_charts
from specdec.config.engine import DTYPE_BYTES
from specdec.config.quantization import CPU_QUANTIZATION_METHODS
from specdec.models.resolve import resolve
from specdec.text.tokenizer import Tokenizer

_METHODS = (NO_METHOD, "ngram", "suffix", "draft_model", "suffix+draft_model", "auto")
_NUM_BLOCKS = 128  # of 16 tokens; each method has its own

_LEAST_GAIN: Mapping[str, float] = {"edit": 1.3, "humaneval": 1.15}
"""Minimum throughput of the better lookup method over no speculation."""
_LEAST_AUTOMATIC = 0.97
"""Minimum throughput of automatic control over no speculation, on each suite."""


@dataclass(frozen=True)
class SingleStreamReport:
    """Complete results of a run.

    num_other_outputs: by case, outputs whose tokens differ from no speculation: ties, in fp32.
    """

    command: str
    machine: Machine
    model: str
    settings: EngineSettings
    num_rounds: int
    max_tokens: int
    temperature: float
    rows: tuple[Row, ...]
    ratios: tuple[Ratio, ...]
    num_other_outputs: Mapping[str, int]


def case_name(suite: str, method: str) -> str:
    """Return the name of a case in rows and ratios."""
    return f"{suite}, {method}"


def comparisons(suites: Sequence[str], methods: Sequence[str]) -> list[Comparison]:
    """Compare each method with none, by suite. Automatic control and lookups have aims."""
    return [
        compare_cases(
            f"{method} / {NO_METHOD}, {suite}",
            case_name(suite, method),
            case_name(suite, NO_METHOD),
            _aim(suite, method),
        )
        for suite in suites
        for method in methods
        if method != NO_METHOD
    ]


def _aim(suite: str, method: str) -> float | None:
    if method == "auto":
        return _LEAST_AUTOMATIC
    return _LEAST_GAIN.get(suite) if method in ("ngram", "suffix") else None


def chart(report: SingleStreamReport) -> str:
    """Return a bar chart of the ratios, grouped by suite, as SVG."""
    groups: dict[str, dict[str, float]] = {}
    for ratio in report.ratios:
        names, _, suite = ratio.name.partition(", ")
        groups.setdefault(suite, {})[names.partition(" / ")[0]] = ratio.median
    title = f"{report.model}, one stream: tokens per second over those without speculation"
    return draw_charts([BarChart(title, groups)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return 0 whether or not the aims are met: machines differ."""
    options = parse_options(_parser(), arguments)
    report = measure(options)
    print_rows(report.rows)
    print_ratios(report.ratios)
    for name, count in report.num_other_outputs.items():
        if count:
            print(f"{name}: {count} outputs differ from those without speculation")
    write_report(report, options.output)
    if report.ratios:
        write_text(options.output.with_suffix(".svg"), chart(report))
    return 0


def measure(options: argparse.Namespace) -> SingleStreamReport:
    """Load the model in its own process, and measure in rounds."""
    directory = resolve(MODEL)
    prompts = load_prompts(options.prompts, Tokenizer(directory))
    suites = options.suites or tuple(dict.fromkeys(each.suite for each in prompts))
    methods = tuple(dict.fromkeys((NO_METHOD, *options.methods)))
    cases = [
        Case(
            case_name(suite, method),
            "engine",
            one_by_one(own, options.max_tokens, method, options.temperature),
        )
        for suite, own in by_suite(prompts, suites, options.rounds).items()
        for method in methods
    ]
    settings = EngineSettings(
        options.dtype, options.quantization, methods, options.num_speculative_tokens, _NUM_BLOCKS
    )
    with Worker(partial(EngineContender, settings=settings), directory) as engine:
        contenders: dict[str, Contender] = {"engine": engine}
        warm_up(contenders, cases)
        measured = measure_rounds(contenders, cases, options.rounds, options.quiet_limit_s)
    return SingleStreamReport(
        command=options.command,
        machine=describe_machine(),
        model=MODEL,
        settings=settings,
        num_rounds=options.rounds,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        rows=tuple(summarize(name, each) for name, each in measured.items()),
        ratios=compare_all(comparisons(suites, methods), measured),
        num_other_outputs={
            case_name(suite, method): num_other_outputs(
                measured, case_name(suite, method), case_name(suite, NO_METHOD)
            )
            for suite in suites
            for method in methods
        },
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.single_stream", description="Compare drafting methods on one stream."
    )
    parser.add_argument("--suites", nargs="+", help="default: those of the prompts")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=_METHODS)
    parser.add_argument("--num-speculative-tokens", type=int, default=NUM_SPECULATIVE_TOKENS)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", choices=DTYPE_BYTES, default="float32")
    parser.add_argument("--quantization", choices=CPU_QUANTIZATION_METHODS)
    add_prompts_option(parser)
    add_round_options(parser, num_rounds=10)
    add_output(parser, "single-stream")
    return parser


if __name__ == "__main__":
    sys.exit(main())
