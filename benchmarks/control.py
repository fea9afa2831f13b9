"""What letting goodput decide loses against the best fixed number of draft tokens, and against off.

On a synthetic target with a set cost curve, in simulated time: so the policy is measured, and no
machine. Rounds alternate: on odd ones the best fixed number is chosen, on even ones it is compared,
so that luck in choosing it does not count. The policy learns on the first round, and is compared on
the others.

    make bench-control
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from tqdm import tqdm

from benchmarks.control_page import page, plot
from benchmarks.synthetic_service import (
    Clock,
    CostCurve,
    SyntheticService,
    auto_policy,
    fixed_policy,
)

STREAMS = (1, 2, 4, 8, 16, 32, 64)
MOST = 7
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
_OUTPUT = Path("docs/benchmarks/control.json")


@dataclass(frozen=True)
class Result:
    """One curve, acceptance and number of streams; tokens a second, medians over even rounds.

    best: the fixed number that was best on odd rounds. chosen: steps by the number that auto chose.
    """

    curve: str
    acceptance: str
    num_streams: int
    best: int
    fixed_tokens_per_s: tuple[float, ...]
    auto_tokens_per_s: float
    chosen: dict[int, int]
    num_changes: int

    @property
    def off_share(self) -> float:
        """Of auto against off."""
        return self.auto_tokens_per_s / self.fixed_tokens_per_s[0]

    @property
    def best_share(self) -> float:
        """Of auto against the better of off and the best fixed number."""
        rates = self.fixed_tokens_per_s
        return self.auto_tokens_per_s / max(rates[0], rates[self.best])


@dataclass(frozen=True)
class Settings:
    """How much is simulated.

    A round lasts `round_s` seconds, and at least as long as `round_steps` plain steps: of few the
    slow ones decide. wrong_by: what the start-up measurement multiplies drafts' cost by.
    """

    num_rounds: int = 8
    round_s: float = 20.0
    round_steps: int = 400
    wrong_by: float = 1.0


def measure(curve: str, acceptance: str, num_streams: int, settings: Settings) -> Result:
    """Runs auto and each fixed number, all in the same rounds."""
    rates, costs = ACCEPTANCE[acceptance], CURVES[curve]
    contenders = []
    for count in (None, *range(MOST + 1)):
        clock = Clock()
        table = costs.table(MOST, settings.wrong_by)
        policy = auto_policy(clock, table, MOST) if count is None else fixed_policy(clock, count)
        seed = 100 * num_streams + (MOST + 1 if count is None else count)
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
        best=max(range(MOST + 1), key=lambda count: fixed_odd[count]),
        fixed_tokens_per_s=tuple(round(each, 1) for each in fixed),
        auto_tokens_per_s=round(auto, 1),
        chosen=dict(sorted(service.chosen.items())),
        num_changes=len(policy.log.changes),
    )


def _split(rounds: Sequence[list[float]]) -> tuple[Sequence[list[float]], Sequence[list[float]]]:
    """The first, third, ... and the second, fourth, ..."""
    return rounds[0::2], rounds[1::2]


def measure_all(settings: Settings) -> list[Result]:
    """Every curve with every acceptance and number of streams."""
    cases = [(curve, rate, size) for curve in CURVES for rate in ACCEPTANCE for size in STREAMS]
    return [measure(*case, settings) for case in tqdm(cases, "cases", leave=False)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 where auto is below its aim anywhere."""
    parser = argparse.ArgumentParser(prog="benchmarks.control", description=__doc__)
    parser.add_argument("--rounds", type=int, default=Settings.num_rounds, help="an even number")
    parser.add_argument("--round-s", type=float, default=Settings.round_s, help="simulated seconds")
    parser.add_argument("--wrong-by", type=float, default=Settings.wrong_by)
    parser.add_argument("--output", type=Path, default=_OUTPUT, help="JSON; .md and .svg beside it")
    options = parser.parse_args(arguments)
    settings = Settings(options.rounds, options.round_s, wrong_by=options.wrong_by)
    results = measure_all(settings)
    worst = min(min(each.best_share, each.off_share) for each in results)
    report = {"settings": asdict(settings), "worst": worst, "results": list(map(asdict, results))}
    options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    options.output.with_suffix(".md").write_text(page(results, AIM), encoding="utf-8")
    options.output.with_suffix(".svg").write_text(plot(results, AIM), encoding="utf-8")
    print(json.dumps({"worst": round(worst, 4), "aim": AIM, "num_cases": len(results)}))
    return 0 if worst >= AIM else 1


if __name__ == "__main__":
    sys.exit(main())
