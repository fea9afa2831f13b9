"""Measure the regret of goodput control: what it loses against the best fixed draft length.

The target is synthetic, with a given cost curve, and time is simulated, so the policy is measured
and not the machine. It decides by noisy times and random results, as in a service; its decisions
are scored by their results on average, and the best length is known from the same averages. Slots
left out of single sequences are compared with equal lengths in the same way.

    python -m benchmarks.control
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from statistics import mean

from tqdm import tqdm

from benchmarks.control_page import Result, SlotGain, charts, page
from benchmarks.report_file import add_output, write_text
from tests.specdec.speculation.policy.synthetic_service import (
    Clock,
    CostCurve,
    SyntheticService,
    WrongPart,
    auto_policy,
    expected_accepted,
)

STREAMS = (1, 8, 16, 32, 64, 128)
SLOT_STREAMS = (16, 32, 64, 128, 256)
MAX_DRAFT_TOKENS = 7
MOST_REGRET, LEAST_OFF_SHARE, LEAST_SLOT_GAIN = 0.03, 0.99, 0.995

_GPU = CostCurve(weights_s=0.010, row_s=0.00005, draft_s=0.0008)
CURVES = {
    "gpu": _GPU,
    "small gpu": CostCurve(weights_s=0.010, row_s=0.0002, draft_s=0.0008),
    "cpu": CostCurve(weights_s=0.020, row_s=0.004, draft_s=0.003),
}
DRAFT_S = {"lookup": 0.0, "head": 0.0003, "draft model": 0.0008}
"""Seconds of a draft token, for the whole batch."""

_SPREAD = (-0.3, -0.15, 0.0, 0.08, 0.14)
"""Differences of the acceptance rates of a load's sequences from one rate."""


def sequences_of(acceptance_length: float, num_draft_tokens: int) -> tuple[tuple[float, ...], ...]:
    """Return the acceptance of sequences that differ, with this acceptance length on average."""
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        rates = [min(max(middle + each, 0.02), 0.98) for each in _SPREAD]
        length = 1 + mean(expected_accepted([rate] * num_draft_tokens) for rate in rates)
        low, high = (middle, high) if length < acceptance_length else (low, middle)
    return tuple((rate,) * MAX_DRAFT_TOKENS for rate in rates)


ACCEPTANCE = {
    "good": ((0.9, 0.88, 0.86, 0.84, 0.82, 0.8, 0.8),),
    "medium": ((0.7, 0.65, 0.6, 0.6, 0.55, 0.5, 0.5),),
    "bad": ((0.2,) * MAX_DRAFT_TOKENS,),
    "5.04 of 7": sequences_of(5.04, 7),
    "2.49 of 3": sequences_of(2.49, 3),
}
"""Acceptance rates by load, each of one kind of sequence or several. The last two have the
extreme acceptance lengths that InferenceX publishes for SPEED-Bench's coding prompts."""

DIFFERING = ("5.04 of 7", "2.49 of 3")


@dataclass(frozen=True)
class Settings:
    """Extent of the simulation.

    The policy learns for `learn_s` seconds and is measured for `round_s`, and for as many as
    `learn_steps` and `round_steps` steps without drafts take if that is longer. wrong_by: factor
    of error in a part of the costs measured at start-up, see `CostCurve.table`.
    """

    num_rounds: int = 4
    learn_s: float = 20.0
    learn_steps: int = 0
    round_s: float = 60.0
    round_steps: int = 1000
    wrong_by: float = 1.0
    wrong_part: WrongPart = "drafts"


@dataclass
class _Run:
    """Totals of auto over all rounds. chosen: steps by the selected number of draft tokens."""

    num_tokens: float = 0.0
    seconds: float = 0.0
    chosen: Counter[int] = field(default_factory=Counter)
    num_changes: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def _run_auto(
    costs: CostCurve,
    kinds: Sequence[Sequence[float]],
    num_streams: int,
    settings: Settings,
    *,
    divides_slots: bool,
) -> _Run:
    """Run auto in rounds that differ by chance."""
    step_s = costs.step_s(num_streams, 0)
    learn_s = max(settings.learn_s, settings.learn_steps * step_s)
    round_s = max(settings.round_s, settings.round_steps * step_s)
    table, verification = (
        each.table(MAX_DRAFT_TOKENS, settings.wrong_by, settings.wrong_part)
        for each in (costs, replace(costs, draft_s=0.0))
    )
    run = _Run()
    for seed in range(settings.num_rounds):
        clock = Clock()
        service = SyntheticService(costs, kinds[0], clock, others=kinds[1:], seed=seed)
        policy = auto_policy(
            clock, table, MAX_DRAFT_TOKENS, verification=verification, divides_slots=divides_slots
        )
        service.run(policy, num_streams, learn_s)
        tokens, seconds = service.expected_tokens, service.expected_s
        num_changes = len(policy.log.changes)
        service.chosen.clear()
        service.run(policy, num_streams, round_s)
        run.num_tokens += service.expected_tokens - tokens
        run.seconds += service.expected_s - seconds
        run.chosen += service.chosen
        run.num_changes += len(policy.log.changes) - num_changes
    return run


def measure(curve: str, acceptance: str, num_streams: int, settings: Settings) -> Result:
    """Compare auto, with equal lengths of all sequences, with fixed numbers of draft tokens."""
    costs, kinds = CURVES[curve], ACCEPTANCE[acceptance]
    run = _run_auto(costs, kinds, num_streams, settings, divides_slots=False)
    return Result(
        curve=curve,
        acceptance=acceptance,
        num_streams=num_streams,
        fixed_tokens_per_s=tuple(
            round(_goodput(costs, kinds, num_streams, count), 1)
            for count in range(MAX_DRAFT_TOKENS + 1)
        ),
        auto_tokens_per_s=round(run.tokens_per_s, 1),
        chosen=dict(sorted(run.chosen.items())),
        num_changes=run.num_changes,
    )


def measure_slots(drafter: str, acceptance: str, num_streams: int, settings: Settings) -> SlotGain:
    """Compare auto with slots left out, and with equal lengths of all sequences."""
    draft_s, kinds = DRAFT_S[drafter], ACCEPTANCE[acceptance]
    costs = replace(_GPU, draft_s=draft_s)
    divided, equal = (
        _run_auto(costs, kinds, num_streams, settings, divides_slots=each).tokens_per_s
        for each in (True, False)
    )
    return SlotGain(drafter, draft_s, acceptance, num_streams, round(divided / equal, 3))


def _goodput(
    costs: CostCurve, kinds: Sequence[Sequence[float]], num_streams: int, count: int
) -> float:
    """Return the tokens per second of a fixed number of draft tokens."""
    tokens = 1 + mean(expected_accepted(rates[:count]) for rates in kinds)
    return num_streams * tokens / costs.step_s(num_streams, count)


def measure_all(settings: Settings) -> list[Result]:
    """Measure each combination of curve, acceptance and number of streams."""
    cases = [(curve, rate, size) for curve in CURVES for rate in ACCEPTANCE for size in STREAMS]
    return [measure(*case, settings) for case in tqdm(cases, "cases", leave=False)]


def measure_all_slots(settings: Settings) -> list[SlotGain]:
    """Measure each drafter with sequences that differ."""
    cases = product(DRAFT_S, DIFFERING, SLOT_STREAMS)
    return [measure_slots(*case, settings) for case in tqdm([*cases], "slots", leave=False)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 where auto misses an aim in any case."""
    options = _parser().parse_args(arguments)
    settings = Settings(options.rounds, options.learn_s, round_s=options.round_s)
    results = measure_all(settings)
    worst = {
        "regret": round(max(each.regret for each in results), 4),
        "off_share": round(min(each.off_share for each in results), 4),
    }
    slots = measure_all_slots(settings)
    worst["slots"] = min(each.gain for each in slots)
    report = {"settings": asdict(settings), **worst}
    report |= {"results": [*map(asdict, results)], "slots_left_out": [*map(asdict, slots)]}
    write_text(options.output, json.dumps(report, indent=1) + "\n")
    write_text(options.output.with_suffix(".md"), page(results, slots))
    print(json.dumps({**worst, "num_cases": len(results)}))
    write_text(options.output.with_suffix(".svg"), charts(results, MOST_REGRET))
    is_met = worst["regret"] <= MOST_REGRET and worst["off_share"] >= LEAST_OFF_SHARE
    return 0 if is_met and worst["slots"] >= LEAST_SLOT_GAIN else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.control", description="Compare goodput control with fixed draft lengths."
    )
    parser.add_argument("--rounds", type=int, default=Settings.num_rounds)
    parser.add_argument("--round-s", type=float, default=Settings.round_s, help="simulated seconds")
    parser.add_argument("--learn-s", type=float, default=Settings.learn_s, help="before measuring")
    add_output(parser, "control")
    return parser


if __name__ == "__main__":
    sys.exit(main())
