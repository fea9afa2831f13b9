"""Simulation of dividing draft tokens by survival against the same number for each sequence.

`python -m benchmarks.draft_budget` prints tokens per unit of cost of the divided budget over those
of the even one, with the engine's own rule. Each sequence has an acceptance rate that changes at
random times, as texts do between prose and repetition. Deterministic: one seed, no clock. A pass of
the target over n rows costs 1 + n / 100, about that of a small model on a CPU. A pass of the draft
model costs a share of it, and the longest draft of the batch decides how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.report_file import markdown_table
from specdec.config.speculation.speculative_checks import DEFAULT_BATCH_BUDGET_MAX
from specdec.types.drafts.draft_survival import AcceptanceHistory, share_by_survival

_ROW_COST = 0.01
_CHANGE = 0.02
"""Probability that a sequence's rate changes in a step: about every 50 steps."""

SPREADS = {"equal": (0.7, 0.7), "mixed": (0.4, 0.95), "two kinds": (0.1, 0.9)}
"""Lowest and highest rate; of two kinds there is nothing between."""


@dataclass(frozen=True)
class Case:
    """A load: sequences with rates of a spread, k draft tokens each, and a draft model's cost."""

    spread: str
    num_sequences: int
    num_draft_tokens: int
    draft_pass_cost: float
    seed: int = 0


def gain(case: Case, num_steps: int = 2000) -> float:
    """Return tokens per cost with the divided budget over those with the even one."""
    return _throughput(case, num_steps, is_divided=True) / _throughput(
        case, num_steps, is_divided=False
    )


def _throughput(case: Case, num_steps: int, *, is_divided: bool) -> float:
    # Separate generators, so that both rules meet the same rates at the same steps.
    text, chance = np.random.default_rng(case.seed), np.random.default_rng(case.seed + 1)
    rates = _new_rates(case, text, case.num_sequences)
    histories = [AcceptanceHistory()] * case.num_sequences
    even = [case.num_draft_tokens] * case.num_sequences
    limits = [max(case.num_draft_tokens, DEFAULT_BATCH_BUDGET_MAX)] * case.num_sequences
    num_tokens, cost = 0, 0.0
    for _ in range(num_steps):
        changes = text.random(case.num_sequences) < _CHANGE
        rates = np.where(changes, _new_rates(case, text, case.num_sequences), rates)
        shares = even
        if is_divided:
            rates_of_tokens = [
                [each.rate] * limit for each, limit in zip(histories, limits, strict=True)
            ]
            shares = share_by_survival(rates_of_tokens, sum(even))
        draws = chance.random((case.num_sequences, max(limits)))
        accepted = [
            _num_accepted(draws[index, :share] < rates[index]) for index, share in enumerate(shares)
        ]
        histories = [
            history.after(share, count)
            for history, share, count in zip(histories, shares, accepted, strict=True)
        ]
        num_tokens += sum(accepted) + case.num_sequences
        cost += 1 + _ROW_COST * (sum(shares) + case.num_sequences)
        cost += case.draft_pass_cost * max(shares)
    return num_tokens / cost


def _new_rates(case: Case, generator: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
    low, high = SPREADS[case.spread]
    if case.spread == "two kinds":
        return np.where(generator.random(count) < 0.5, low, high)
    return generator.uniform(low, high, count)


def _num_accepted(is_accepted: npt.NDArray[np.bool_]) -> int:
    return int(np.argmin(np.append(is_accepted, False)))


def main() -> None:
    """Print the table."""
    rows = [
        [spread, str(count), str(k), *(f"{gain(Case(spread, count, k, c)):.3f}" for c in _COSTS)]
        for spread in SPREADS
        for count in (2, 8, 32)
        for k in (2, 4)
    ]
    headers = ["rates", "sequences", "k", *(f"draft pass {cost:g}" for cost in _COSTS)]
    print(markdown_table(headers, rows))


_COSTS = (0.0, 0.02, 0.1)

if __name__ == "__main__":
    main()
