"""Measure what automatic control loses against the best fixed number of draft tokens, and off.

Runs the real service with the demo model and changes its settings as an operator would;
benchmarks.control does the same on a synthetic target. At each number of streams all contenders
take turns. The best fixed number is selected on odd rounds and compared on even rounds, so a lucky
selection does not count.

    python -m benchmarks.service_control [--method ngram] [--rounds 4] [--output FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

from benchmarks.machine import Machine, describe_machine
from benchmarks.prompts import SUITES, add_prompts_option, by_suite, load_prompts
from benchmarks.report_file import (
    add_output,
    command_line,
    markdown_table,
    write_report,
    write_text,
)
from benchmarks.rounds import Case, Measured, add_round_options, measure_rounds, warm_up
from benchmarks.service import started_service
from benchmarks.steered import STEERED, SteeredContender
from benchmarks.summary import Row, print_rows, summarize
from benchmarks.workloads import MODEL, Contender, Workload
from cluster.cli.charts import LineChart, draw_charts
from specdec.client import AdminClient
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.models.resolve import print_progress, resolve
from specdec.text.tokenizer import Tokenizer
from specdec.types.control import SpeculationChange

_NUM_STREAMS = (1, 2, 4, 8, 16, 32, 64)
_FIXED = (1, 3, 5, 7)
_AIM = 0.95
_MIN_REQUESTS = 8  # fewer streams run several requests, one after the other

AUTO, OFF = "auto", "off"


@dataclass(frozen=True)
class LoadResult:
    """One number of streams: medians of tokens per second on even rounds.

    best: the fixed number that was best on odd rounds.
    best_share: auto's rate over the better of off and the best fixed number.
    """

    num_streams: int
    tokens_per_s: Mapping[str, float]
    best: str
    best_share: float
    off_share: float


@dataclass(frozen=True)
class ServiceControlReport:
    """Complete results. aim: minimum of best_share."""

    command: str
    machine: Machine
    model: str
    method: str
    num_rounds: int
    max_tokens: int
    aim: float
    rows: tuple[Row, ...]
    results: tuple[LoadResult, ...]


def changes(fixed: Sequence[int]) -> dict[str, SpeculationChange]:
    """Return the settings of each contender, each relative to the configuration."""
    return {
        AUTO: SpeculationChange(reset=True),
        OFF: SpeculationChange(reset=True, mode="off"),
        **{
            str(count): SpeculationChange(reset=True, mode="on", num_speculative_tokens=count)
            for count in fixed
        },
    }


def make_cases(
    prompts: Sequence[tuple[int, ...]], max_tokens: int, contenders: Sequence[str]
) -> list[Case]:
    """Return all contenders at each number of streams, grouped by the number."""
    cases = []
    for count in _NUM_STREAMS:
        repeated = tuple(prompts[i % len(prompts)] for i in range(max(count, _MIN_REQUESTS)))
        workloads = (Workload(repeated, max_tokens, STEERED, count),)
        cases += [Case(f"{name} {count}", name, workloads) for name in contenders]
    return cases


def results(measured: Measured, contenders: Sequence[str]) -> tuple[LoadResult, ...]:
    """Return one result per number of streams. Needs at least two rounds."""
    return tuple(
        _result(
            count,
            {
                name: [each.tokens_per_s for each in measured[f"{name} {count}"]]
                for name in contenders
            },
        )
        for count in _NUM_STREAMS
    )


def _result(num_streams: int, rates: Mapping[str, Sequence[float]]) -> LoadResult:
    odd, even = ({name: median(each[i::2]) for name, each in rates.items()} for i in (0, 1))
    best = max((name for name in rates if name not in (AUTO, OFF)), key=lambda name: odd[name])
    return LoadResult(
        num_streams=num_streams,
        tokens_per_s=even,
        best=best,
        best_share=even[AUTO] / max(even[OFF], even[best]),
        off_share=even[AUTO] / even[OFF],
    )


def measure(prompts: Sequence[tuple[int, ...]], options: argparse.Namespace) -> Measured:
    """Start the service and measure all contenders on it."""
    config = SpeculativeConfig.of(options.method, num_speculative_tokens=max(_FIXED))
    print_progress("starting the service")
    with ExitStack() as stack:
        service = stack.enter_context(
            started_service(MODEL, speculative_config=config, enable_prefix_caching=False)
        )
        admin = stack.enter_context(AdminClient(service.address))
        contenders: dict[str, Contender] = {
            name: SteeredContender(service.address, admin, change)
            for name, change in changes(_FIXED).items()
        }
        cases = make_cases(prompts, options.max_tokens, list(contenders))
        warm_up(contenders, cases[: len(contenders)])
        return measure_rounds(contenders, cases, options.rounds, options.quiet_limit_s)


def chart(found: Sequence[LoadResult]) -> str:
    """Return a chart of tokens per second by streams, as SVG."""
    series = {name: [each.tokens_per_s[name] for each in found] for name in found[0].tokens_per_s}
    title = "tokens per second: automatic control, off, and fixed numbers of draft tokens"
    return draw_charts([LineChart(title, "streams", _NUM_STREAMS, series)])


def page(report: ServiceControlReport) -> str:
    """Return the page, in Markdown."""
    names = list(report.results[0].tokens_per_s)
    rows = [
        (
            str(each.num_streams),
            *(f"{each.tokens_per_s[name]:.0f}" for name in names),
            each.best,
            f"{each.best_share:.2f}",
            f"{each.off_share:.2f}",
        )
        for each in report.results
    ]
    return f"""# Automatic control against fixed draft lengths, real service

Generated by `{report.command}` on {report.machine.num_cores} cores ({report.machine.cpu_model}). \
Data: [service-control.json](service-control.json). The same comparison in simulated time, which \
has to meet the aim of {report.aim:g}: [control.md](control.md).

- {report.model} with {report.method}; tokens per second by streams, medians of even rounds.
- *best* is the fixed number of draft tokens that was best on odd rounds.
- *of best* is auto's throughput over the better of *best* and off.

![tokens per second by streams](service-control.svg)

{markdown_table(("streams", *names, "best", "of best", "of off"), rows)}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return 0 whether or not the aim is met: machines differ."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    options = parser.parse_args(given)
    if options.rounds < 2:
        parser.error("--rounds must be at least 2: one to select the best length, one to compare")
    known = load_prompts(options.prompts, Tokenizer(resolve(MODEL)))
    suites = by_suite(known, SUITES, -(-max(_NUM_STREAMS) // len(SUITES)))
    prompts = [prompt for each in zip(*suites.values(), strict=False) for prompt in each]
    measured = measure(prompts, options)
    report = ServiceControlReport(
        command=command_line("benchmarks.service_control", given),
        machine=describe_machine(),
        model=MODEL,
        method=options.method,
        num_rounds=options.rounds,
        max_tokens=options.max_tokens,
        aim=_AIM,
        rows=tuple(summarize(name, each) for name, each in measured.items()),
        results=results(measured, list(changes(_FIXED))),
    )
    print_rows(report.rows)
    write_text(options.output.with_suffix(".svg"), chart(report.results))
    write_text(options.output.with_suffix(".md"), page(report))
    write_report(report, options.output)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.service_control",
        description="Measure automatic control against fixed numbers of draft tokens.",
    )
    parser.add_argument("--method", choices=("ngram", "suffix"), default="ngram")
    add_prompts_option(parser)
    add_round_options(parser, num_rounds=4)
    add_output(parser, "service-control")
    return parser


if __name__ == "__main__":
    sys.exit(main())
