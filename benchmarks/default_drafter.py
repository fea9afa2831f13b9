"""Measure the service as it comes: its own choice of a drafter, against speculation off.

--drafter measures another one of the model's drafters in its place.

The service has every default but the precision, and no prefix cache, since the prompts repeat. One
stream runs the prompts of each suite, with automatic control and switched off in turn; several
streams run a mix of the suites, in half as many rounds. Both take turns on the same service and the
same prompts, so only the settings differ.

    python -m benchmarks.default_drafter [--quantization int8] [--rounds 8] [--output FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from benchmarks.machine import Machine, describe_machine
from benchmarks.prompts import add_prompts_option, by_suite, load_prompts
from benchmarks.report_file import DOCS, add_output, parse_options, write_report
from benchmarks.rounds import Case, Measured, add_round_options, measure_rounds, warm_up
from benchmarks.service import started_service
from benchmarks.steered import STEERED, SteeredContender
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
from benchmarks.workloads import MODEL, all_at_once, one_by_one
from cluster.config.serve_config import ServeConfig
from specdec.client import AdminClient
from specdec.config.model_aliases import ALIASES
from specdec.config.quantization import CPU_QUANTIZATION_METHODS
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.llm.drafter_choice import with_fastest_drafter
from specdec.models.resolve import print_progress, resolve
from specdec.text.tokenizer import Tokenizer
from specdec.types.control import SpeculationChange

_SUITES = ("mt_bench", "humaneval", "gsm8k")
_NUM_STREAMS = (4, 16, 64)
_LEAST_GAIN = {"none": 1.5, "int8": 1.3}
"""Minimum throughput of one stream over speculation off, on each suite, by quantization."""
_LEAST_OF_STREAMS = 0.98

_DRAFTERS = {each.name.removeprefix(f"{MODEL}-"): each for each in ALIASES[MODEL].drafters}
_SHOWN_KEYS = ("method", "model", "num_speculative_tokens", "quantization")

AUTO, OFF = "auto", "off"
_CHANGES = {
    AUTO: SpeculationChange(reset=True),
    OFF: SpeculationChange(reset=True, mode="off"),
}


@dataclass(frozen=True)
class DefaultDrafterReport:
    """Complete results of a run.

    drafter: the first keys of the chosen speculative_config. num_other_outputs: outputs whose
    tokens differ from those without speculation: ties.
    """

    command: str
    machine: Machine
    model: str
    quantization: str
    drafter: dict[str, Any]
    rows: tuple[Row, ...]
    ratios: tuple[Ratio, ...]
    num_other_outputs: int


def make_cases(
    prompts: dict[str, list[tuple[int, ...]]], max_tokens: int
) -> tuple[list[Case], list[Case]]:
    """Return the cases of one stream, by suite, and those of several streams."""
    single = [
        Case(f"{suite}, {name}", name, one_by_one(own, max_tokens, STEERED))
        for suite, own in prompts.items()
        for name in _CHANGES
    ]
    mixed = list(chain.from_iterable(zip(*prompts.values(), strict=False)))
    several = [
        Case(f"{count} streams, {name}", name, all_at_once(mixed, count, max_tokens, STEERED))
        for count in _NUM_STREAMS
        for name in _CHANGES
    ]
    return single, several


def comparisons(quantization: str) -> list[Comparison]:
    """Compare automatic control with off, on each suite and at each number of streams."""
    aims = {suite: _LEAST_GAIN.get(quantization) for suite in _SUITES}
    aims |= {f"{count} streams": _LEAST_OF_STREAMS for count in _NUM_STREAMS}
    return [
        compare_cases(f"{AUTO} / {OFF}, {name}", f"{name}, {AUTO}", f"{name}, {OFF}", aim)
        for name, aim in aims.items()
    ]


def measure(config: ServeConfig, options: argparse.Namespace) -> Measured:
    """Start the service, and measure all cases."""
    known = load_prompts(options.prompts, Tokenizer(resolve(MODEL)))
    single, several = make_cases(by_suite(known, _SUITES, options.rounds), options.max_tokens)
    print_progress("starting the service")
    settings: dict[str, Any] = {
        "quantization": config.quantization,
        "speculative_config": config.speculative_config,
        "enable_prefix_caching": False,
    }
    with started_service(MODEL, **settings) as service, AdminClient(service.address) as admin:
        contenders = {
            name: SteeredContender(service.address, admin, change)
            for name, change in _CHANGES.items()
        }
        warm_up(contenders, [*single, *several[:2]])
        limit_s = options.quiet_limit_s
        measured = measure_rounds(contenders, single, options.rounds, limit_s)
        num_rounds = max(2, options.rounds // 2)
        return measured | measure_rounds(contenders, several, num_rounds, limit_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return 0 whether or not the aims are met: machines differ."""
    options = parse(arguments)
    config = with_fastest_drafter(configured(options), print_progress)
    assert config.speculative_config is not None
    chosen = config.speculative_config.to_mapping()
    measured = measure(config, options)
    names = {name.rpartition(", ")[0] for name in measured}
    report = DefaultDrafterReport(
        command=options.command,
        machine=describe_machine(),
        model=MODEL,
        quantization=options.quantization,
        drafter={name: chosen[name] for name in _SHOWN_KEYS if name in chosen},
        rows=tuple(summarize(name, found) for name, found in measured.items()),
        ratios=compare_all(comparisons(options.quantization), measured),
        num_other_outputs=sum(
            num_other_outputs(measured, f"{name}, {AUTO}", f"{name}, {OFF}") for name in names
        ),
    )
    print_rows(report.rows)
    print_ratios(report.ratios)
    write_report(report, options.output)
    return 0


def configured(options: argparse.Namespace) -> ServeConfig:
    """Return the configuration of the service; it leaves the drafter open unless one is named."""
    config = ServeConfig(model=MODEL, quantization=options.quantization)
    if options.drafter is None:
        return config
    speculation = SpeculativeConfig.of(**_DRAFTERS[options.drafter].keys(config.device))
    return replace(config, speculative_config=speculation)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; a quantization has a separate report."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.default_drafter", description="Measure the default drafter of the service."
    )
    parser.add_argument(
        "--quantization", choices=("none", *CPU_QUANTIZATION_METHODS), default="none"
    )
    parser.add_argument("--drafter", choices=_DRAFTERS)
    add_prompts_option(parser)
    add_round_options(parser, 8)
    add_output(parser, "default-drafter")
    options = parse_options(parser, arguments)
    if options.quantization != "none" and options.output == parser.get_default("output"):
        options.output = DOCS / f"default-drafter-{options.quantization}.json"
    return options


if __name__ == "__main__":
    sys.exit(main())
