"""Measure what goodput control loses against the best fixed draft length, and against off.

The target is synthetic, with a given cost curve, and time is simulated, so the policy is measured
and not the machine. Rounds alternate: the best fixed number is selected on odd rounds and compared
on even rounds, so a lucky selection does not count. The policy learns in the first round and is
compared on the others.

    python -m benchmarks.control
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from tqdm import tqdm

from benchmarks.control_page import Result, page, plot
from benchmarks.report_file import add_output, write_text
from tests.specdec.speculation.policy.synthetic_service import (
    Clock,
    CostCurve,
    SyntheticService,
    auto_policy,
    fixed_policy,
)

STREAMS = (1, 2, 4, 8, 16, 32, 64)
MAX_DRAFT_TOKENS = 7
AIM = 0.95

CURVES = {
    "gpu": CostCurve(weights_s=0.010, row_s=0.00005, draft_s=0.0008),
    "small gpu": CostCurve(weights_s=0.010, row_s=0.0002, draft_s=0.0008),
    "cpu": CostCurve(weights_s=0.020, row_s=0.004, draft_s=0.003),
}
ACCEPTANCE = {
    "good": (0.9, 0.88, 0.86, 0.84, 0.82, 0.8, 0.8),
    "medium": (0.7, 0.65, 0.6, 0.6, 0.55, 0.5, 0.5),
    "bad": (0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2),
}


@dataclass(frozen=True)
class Settings:
    """Extent of the simulation.

    A round lasts `round_s` seconds and at least `round_steps` steps without drafts: in a short
    round the few slow steps dominate. wrong_by: factor of error in the drafts' cost measured at
    start-up.
    """

    num_rounds: int = 8
    round_s: float = 20.0
    round_steps: int = 400
    wrong_by: float = 1.0


def measure(curve: str, acceptance: str, num_streams: int, settings: Settings) -> Result:
    """Run auto and each fixed number, all in the same rounds."""
    rates, costs = ACCEPTANCE[acceptance], CURVES[curve]
    contenders = []
    for count in (None, *range(MAX_DRAFT_TOKENS + 1)):
        clock = Clock()
        if count is None:
            table = costs.table(MAX_DRAFT_TOKENS, settings.wrong_by)
            policy = auto_policy(clock, table, MAX_DRAFT_TOKENS)
        else:
            policy = fixed_policy(clock, count)
        seed = 100 * num_streams + (MAX_DRAFT_TOKENS + 1 if count is None else count)
        contenders.append((policy, SyntheticService(costs, rates, clock, seed=seed)))
    round_s = max(settings.round_s, settings.round_steps * costs.step_s(num_streams, 0))
    rounds = [
        [service.run(policy, num_streams, round_s) for policy, service in contenders]
        for _ in range(settings.num_rounds)
    ]
    odd, even = ([median(column) for column in zip(*part, strict=True)] for part in _split(rounds))
    _, *fixed_odd = odd
    auto, *fixed = even
    policy, service = contenders[0]
    return Result(
        curve=curve,
        acceptance=acceptance,
        num_streams=num_streams,
        best=max(range(MAX_DRAFT_TOKENS + 1), key=lambda count: fixed_odd[count]),
        fixed_tokens_per_s=tuple(round(each, 1) for each in fixed),
        auto_tokens_per_s=round(auto, 1),
        chosen=dict(sorted(service.chosen.items())),
        num_changes=len(policy.log.changes),
    )


def _split(rounds: Sequence[list[float]]) -> tuple[Sequence[list[float]], Sequence[list[float]]]:
    """Return the first, third, ... rounds, and the second, fourth, ... rounds."""
    return rounds[0::2], rounds[1::2]


def measure_all(settings: Settings) -> list[Result]:
    """Measure each combination of curve, acceptance and number of streams."""
    cases = [(curve, rate, size) for curve in CURVES for rate in ACCEPTANCE for size in STREAMS]
    return [measure(*case, settings) for case in tqdm(cases, "cases", leave=False)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if auto is below its aim in any case."""
    options = _parser().parse_args(arguments)
    settings = Settings(options.rounds, options.round_s, wrong_by=options.wrong_by)
    results = measure_all(settings)
    worst = min(min(each.best_share, each.off_share) for each in results)
    report = {"settings": asdict(settings), "worst": worst, "results": list(map(asdict, results))}
    write_text(options.output, json.dumps(report, indent=1) + "\n")
    write_text(options.output.with_suffix(".md"), page(results, AIM))
    write_text(options.output.with_suffix(".svg"), plot(results, AIM))
    print(json.dumps({"worst": round(worst, 4), "aim": AIM, "num_cases": len(results)}))
    return 0 if worst >= AIM else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.control", description="Compare goodput control with fixed draft lengths."
    )
    parser.add_argument("--rounds", type=int, default=Settings.num_rounds, help="an even number")
    parser.add_argument("--round-s", type=float, default=Settings.round_s, help="simulated seconds")
    parser.add_argument(
        "--wrong-by",
        type=float,
        default=Settings.wrong_by,
        help="factor of error in the drafts' cost measured at start-up",
    )
    add_output(parser, "control")
    return parser


if __name__ == "__main__":
    sys.exit(main())
