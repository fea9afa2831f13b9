"""Measure the cost of speculation that an operator has switched off.

One service has a draft model, or with --head a head with random weights, and is switched off at
run time; its draft worker stays alive. With --async-drafting that model would draft ahead. Another
one was started without speculation. They take turns at several numbers of streams, in a closed
loop; with few streams, where a measurement is short and noisy, more often. After half of the
rounds both are restarted in the other order, because the memory layout of a process changes the
speed by one or two percent.

    python -m benchmarks.off_cost [--head eagle3 | --async-drafting outcomes] [--rounds 10]
        [--output FILE]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import numpy as np

from benchmarks.contenders import ServiceContender
from benchmarks.machine import Machine, describe_machine
from benchmarks.prompts import add_prompts_option, load_prompts, of_similar_length
from benchmarks.random_heads import HEADS
from benchmarks.report_file import DOCS, add_output, parse_options, write_report
from benchmarks.rounds import Case, Measured, add_round_options, measure_rounds, warm_up
from benchmarks.service import started_service
from benchmarks.steered import STEERED, steer
from benchmarks.summary import Bar, Row, at_least, print_bars, print_rows, summarize
from benchmarks.workloads import MODEL, NO_METHOD, Contender, Measurement, all_at_once
from specdec.client import AdminClient
from specdec.config.speculation.methods import AsyncDrafting
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.models.config.model_config import ModelConfig
from specdec.models.resolve import print_progress, resolve
from specdec.text.tokenizer import Tokenizer
from specdec.types.control import SpeculationChange

_PAIRS_PER_ROUND = {1: 12, 8: 8, 32: 3}  # by the number of streams
_MOST_PROMPTS = 48
_LEAST_MEDIAN, _LEAST_MEDIAN_OF_KINDS, _LEAST_BOUND = 0.98, 0.99, 0.95
"""Minimum of the median ratio with a plain draft model, the same with a head or drafts ahead, and
minimum of its lower bound."""

_CONFIDENCE = 0.95
_DRAFT_WORKER_TIMEOUT_S = 60.0
_RESAMPLES = 10_000

OFF, WITHOUT = "switched off", "without speculation"


@dataclass(frozen=True)
class Share:
    """Throughput of the switched-off service over that of the service without speculation.

    lower_bound: of the median, one-sided, at 95 %, by bootstrap over the pairs.
    """

    num_streams: int
    median: float
    lower_bound: float
    of_each_round: tuple[float, ...]


@dataclass(frozen=True)
class OffReport:
    """Complete results of a run.

    head: the kind of the head; None for a draft model. async_drafting: of the draft model.
    """

    command: str
    machine: Machine
    model: str
    head: str | None
    async_drafting: AsyncDrafting
    num_rounds: int
    max_tokens: int
    rows: tuple[Row, ...]
    shares: tuple[Share, ...]
    bars: tuple[Bar, ...]


def make_cases(prompts: Sequence[tuple[int, ...]], max_tokens: int) -> list[Case]:
    """Return both services at each number of streams; each stream runs one request."""
    cases = []
    for count in _PAIRS_PER_ROUND:
        for contender, method in ((OFF, STEERED), (WITHOUT, NO_METHOD)):
            workloads = all_at_once(prompts, count, max_tokens, method)
            cases.append(Case(f"{contender} {count}", contender, workloads))
    return cases


def shares(measured: Measured) -> tuple[Share, ...]:
    """Return the ratios of the rounds at each number of streams."""
    found = []
    for count in _PAIRS_PER_ROUND:
        pairs = zip(measured[f"{OFF} {count}"], measured[f"{WITHOUT} {count}"], strict=True)
        ratios = tuple(off.tokens_per_s / without.tokens_per_s for off, without in pairs)
        found.append(Share(count, float(np.median(ratios)), lower_bound(ratios), ratios))
    return tuple(found)


def lower_bound(ratios: Sequence[float], seed: int = 0) -> float:
    """Return the one-sided lower bound of the median, by percentile bootstrap (Efron 1979)."""
    drawn = np.random.default_rng(seed).choice(ratios, (_RESAMPLES, len(ratios)))
    return float(np.quantile(np.median(drawn, axis=1), 1 - _CONFIDENCE))


def bars(found: Sequence[Share], *, is_plain: bool = True) -> tuple[Bar, ...]:
    """Check the median and the lower bound at each number of streams.

    is_plain: whether speculation has a draft model without drafts ahead.
    """
    least = _LEAST_MEDIAN if is_plain else _LEAST_MEDIAN_OF_KINDS
    return tuple(
        bar
        for each in found
        for bar in (
            at_least(f"median, {each.num_streams} streams", each.median, least),
            at_least(f"lower bound, {each.num_streams} streams", each.lower_bound, _LEAST_BOUND),
        )
    )


def measure(cases: Sequence[Case], options: argparse.Namespace) -> Measured:
    """Measure all rounds, half of them on each of two pairs of services."""
    measured: dict[str, list[Measurement]] = {case.name: [] for case in cases}
    orders = ((OFF, WITHOUT), (WITHOUT, OFF))
    for order, num_rounds in zip(orders, halves(options.rounds), strict=True):
        if num_rounds:
            found = measure_pair(order, cases, num_rounds, options)
            for name, each in found.items():
                measured[name] += each
    return measured


def halves(count: int) -> tuple[int, int]:
    """Split a count into two halves, the larger one first."""
    return count - count // 2, count // 2


def measure_pair(
    order: Sequence[str], cases: Sequence[Case], num_rounds: int, options: argparse.Namespace
) -> Measured:
    """Start both services in the given order, and measure; the other service is idle meanwhile."""
    shared: dict[str, Any] = {"enable_prefix_caching": False, "max_num_seqs": 32}
    own: dict[str, dict[str, Any]] = {
        OFF: {"speculative_config": draft_config(options.async_drafting)},
        WITHOUT: {"speculative_config": None},
    }
    with ExitStack() as stack:
        if options.head is not None:
            directory = Path(stack.enter_context(TemporaryDirectory()))
            own[OFF]["speculative_config"] = head_config(options.head, directory)
        print_progress("starting both services")
        addresses = {
            name: stack.enter_context(started_service(MODEL, **shared, **own[name])).address
            for name in order
        }
        admin = stack.enter_context(AdminClient(addresses[OFF]))
        steer(admin, SpeculationChange(mode="off"))
        if options.head is None:
            _wait_for_draft_worker(admin)
        contenders: dict[str, Contender] = {
            name: ServiceContender(address) for name, address in addresses.items()
        }
        warm_up(contenders, cases)
        measured: dict[str, list[Measurement]] = {}
        for count, num_pairs in _PAIRS_PER_ROUND.items():
            turns = [case for case in cases if case.workloads[0].num_open == count]
            measured |= measure_rounds(
                contenders, turns, num_pairs * num_rounds, options.quiet_limit_s
            )
        return measured


def draft_config(async_drafting: AsyncDrafting) -> SpeculativeConfig:
    """Return the configuration of the target's int8 copy as its draft model."""
    return SpeculativeConfig.of("draft_model", quantization="int8", async_drafting=async_drafting)


def head_config(head: str, directory: Path) -> SpeculativeConfig:
    """Write a head for the benchmarks' model below `directory`, and return its configuration."""
    target = ModelConfig.from_directory(resolve(MODEL))
    return SpeculativeConfig.of(head, model=str(HEADS[head](directory / head, target)))


def _wait_for_draft_worker(admin: AdminClient) -> None:
    """Wait until each replica reports its draft worker, which may load later than the target."""
    deadline = time.monotonic() + _DRAFT_WORKER_TIMEOUT_S
    while not all(each.report.is_draft_worker_up for each in admin.replicas()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the draft worker is not ready after {_DRAFT_WORKER_TIMEOUT_S:g} s")
        time.sleep(1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return 0 whether or not the aims are met: machines differ."""
    options = parse(arguments)
    known = load_prompts(options.prompts, Tokenizer(resolve(MODEL)))
    cases = make_cases(of_similar_length(known, _MOST_PROMPTS), options.max_tokens)
    measured = measure(cases, options)
    found = shares(measured)
    report = OffReport(
        command=options.command,
        machine=describe_machine(),
        model=MODEL,
        head=options.head,
        async_drafting=options.async_drafting,
        num_rounds=options.rounds,
        max_tokens=options.max_tokens,
        rows=tuple(summarize(name, each) for name, each in measured.items()),
        shares=found,
        bars=bars(found, is_plain=options.head is None and options.async_drafting == "off"),
    )
    print_rows(report.rows)
    print_bars(report.bars)
    write_report(report, options.output)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; a head and drafts ahead have separate reports."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.off_cost", description="Measure the cost of switched-off speculation."
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--head", choices=HEADS, help="load a head with random weights instead of a draft model"
    )
    kind.add_argument(
        "--async-drafting",
        choices=get_args(AsyncDrafting),
        default="off",
        help="what the draft model would draft ahead",
    )
    add_prompts_option(parser)
    add_round_options(parser, num_rounds=10)
    add_output(parser, "off-cost")
    options = parse_options(parser, arguments)
    if options.head is not None and options.output == parser.get_default("output"):
        options.output = DOCS / f"off-cost-{options.head}.json"
    elif options.async_drafting != "off" and options.output == parser.get_default("output"):
        options.output = DOCS / f"off-cost-async-{options.async_drafting}.json"
    return options


if __name__ == "__main__":
    sys.exit(main())
