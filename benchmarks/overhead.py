"""Measure the cost of Ray, gRPC and all work outside the model's forward pass.

The same prompts run in process and through the service, with 1 and 16 streams, in fp32 and int8,
each pair in turn. For the engine in process, also report the share of a step outside the forward
pass. Speculation is off.

    python -m benchmarks.overhead [--stream-interval 4] [--output FILE]
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contenders import (
    EngineContender,
    EngineSettings,
    ServiceContender,
    StepProfile,
)
from benchmarks.machine import Machine, describe_machine
from benchmarks.prompts import add_prompts_option, load_prompts, of_similar_length
from benchmarks.report_file import add_output, command_line, write_report
from benchmarks.rounds import Case, Measured, add_round_options, measure_rounds, warm_up
from benchmarks.service import started_service
from benchmarks.step_bench import PRECISIONS, Precision
from benchmarks.summary import (
    Bar,
    Ratio,
    Row,
    at_most,
    compare_all,
    compare_cases,
    print_bars,
    print_ratios,
    print_rows,
    summarize,
)
from benchmarks.worker import Worker
from benchmarks.workloads import MODEL, Contender, all_at_once, one_by_one
from specdec.config.llm import LLMConfig
from specdec.models.resolve import print_progress, resolve
from specdec.text.tokenizer import Tokenizer

_NUM_STREAMS = (1, 16)
_LEAST_SHARE: Mapping[str, float] = {"fp32": 1 / 1.05, "int8": 1 / 1.15}
"""Minimum throughput of the service over the engine's: at most 5 and 15 % slower."""
_MOST_OUTSIDE = 0.08
"""Maximum share of a step outside the model's forward pass."""


@dataclass(frozen=True)
class Profile:
    """Breakdown of a step's time in one precision."""

    precision: str
    step: StepProfile
    outside_forward: float


@dataclass(frozen=True)
class OverheadReport:
    """Complete results. stream_interval: of the service; None for its default."""

    command: str
    machine: Machine
    model: str
    stream_interval: int | None
    num_rounds: int
    max_tokens: int
    rows: tuple[Row, ...]
    ratios: tuple[Ratio, ...]
    profiles: tuple[Profile, ...]
    bars: tuple[Bar, ...]


def make_cases(precision: str, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> list[Case]:
    """Return engine and service, with 1 and with 16 streams."""
    return [
        Case(
            f"{contender} {precision} {count}",
            contender,
            one_by_one(prompts, max_tokens)
            if count == 1
            else all_at_once(prompts, count, max_tokens),
        )
        for count in _NUM_STREAMS
        for contender in ("engine", "service")
    ]


def ratios(measured: Measured) -> tuple[Ratio, ...]:
    """Return the service's tokens per second over the engine's."""
    comparisons = [
        compare_cases(
            f"service / engine, {precision}, {count} streams",
            f"service {precision} {count}",
            f"engine {precision} {count}",
            least,
        )
        for precision, least in _LEAST_SHARE.items()
        for count in _NUM_STREAMS
    ]
    return compare_all(comparisons, measured)


def measure_precision(
    directory: Path, precision: Precision, cases: Sequence[Case], options: argparse.Namespace
) -> tuple[Measured, list[Profile]]:
    """Start engine and service, measure in rounds, and profile the engine."""
    settings = EngineSettings(
        precision.dtype, precision.quantization, max_prefill_tokens=LLMConfig().prefill_limit
    )
    with (
        started_service(MODEL, **service_settings(precision, options.stream_interval)) as service,
        Worker(partial(EngineContender, settings=settings), directory) as engine,
    ):
        contenders: dict[str, Contender] = {
            "engine": engine,
            "service": ServiceContender(service.address),
        }
        warm_up(contenders, cases)
        measured = measure_rounds(contenders, cases, options.rounds, options.quiet_limit_s)
        steps = [
            typical_profile(engine, case, options.rounds)
            for case in cases
            if case.contender == "engine"
        ]
    profiles = [Profile(precision.name, step, step.outside_forward) for step in steps]
    return measured, profiles


def typical_profile(engine: Worker, case: Case, num_rounds: int) -> StepProfile:
    """Return the profile with the median share outside the forward pass, of `num_rounds`."""
    workloads = itertools.islice(itertools.cycle(case.workloads), num_rounds)
    profiles: list[StepProfile] = [engine.call("profile", workload) for workload in workloads]
    return sorted(profiles, key=lambda each: each.outside_forward)[num_rounds // 2]


def service_settings(precision: Precision, stream_interval: int | None) -> dict[str, Any]:
    """Return fields of ServeConfig: no drafts, no prefix cache, and `stream_interval` if given.

    The stream interval is the number of new tokens per message of a stream.
    """
    settings: dict[str, Any] = {
        "dtype": precision.dtype,
        "quantization": precision.quantization or "none",
        "speculative_config": None,
        "enable_prefix_caching": False,
    }
    return settings | ({} if stream_interval is None else {"stream_interval": stream_interval})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return 0 whether or not the aims are met: machines differ."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser().parse_args(given)
    directory = resolve(MODEL)
    prompts = of_similar_length(
        load_prompts(options.prompts, Tokenizer(directory)), max(_NUM_STREAMS)
    )
    measured: dict[str, Any] = {}
    profiles: list[Profile] = []
    for name in options.precisions:
        print_progress(f"{name}: loading engine and service")
        cases = make_cases(name, prompts, options.max_tokens)
        own, own_profiles = measure_precision(directory, PRECISIONS[name], cases, options)
        measured |= own
        profiles += own_profiles
    report = OverheadReport(
        command=command_line("benchmarks.overhead", given),
        machine=describe_machine(),
        model=MODEL,
        stream_interval=options.stream_interval,
        num_rounds=options.rounds,
        max_tokens=options.max_tokens,
        rows=tuple(summarize(name, each) for name, each in measured.items()),
        ratios=ratios(measured),
        profiles=tuple(profiles),
        bars=tuple(
            at_most(
                f"outside the forward pass, {each.precision}, {each.step.num_streams} streams",
                each.outside_forward,
                _MOST_OUTSIDE,
            )
            for each in profiles
        ),
    )
    print_rows(report.rows)
    print_ratios(report.ratios)
    print_bars(report.bars)
    write_report(report, options.output)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.overhead", description="Measure the overhead of the service and of a step."
    )
    names = tuple(_LEAST_SHARE)
    parser.add_argument("--precisions", nargs="+", choices=names, default=names)
    parser.add_argument("--stream-interval", type=int, help="tokens per message of the service")
    add_prompts_option(parser)
    add_round_options(parser, num_rounds=5)
    add_output(parser, "overhead")
    return parser


if __name__ == "__main__":
    sys.exit(main())
