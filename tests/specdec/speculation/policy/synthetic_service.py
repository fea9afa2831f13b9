"""Simulated target and drafter with given cost and acceptance, on a simulated clock.

A policy can run minutes of service in moments, and can be compared with fixed draft lengths.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from typing import Literal, Protocol

from specdec.speculation.policy.cost_model import CostModel
from specdec.speculation.policy.cost_table import CostTable
from specdec.speculation.policy.goodput import GoodputChooser
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.types.control import SpeculationControl
from specdec.types.drafts.draft_survival import AcceptanceHistory
from specdec.types.drafts.slot_rule import KEPT_EVIDENCE

_STEPS_OF_SEQUENCE = 100

WrongPart = Literal["drafts", "making", "rows", "all", "batch"]


@dataclass
class Clock:
    """Clock whose `now_s` is advanced by the simulation only."""

    now_s: float = 100.0

    def __call__(self) -> float:
        """Return the current time."""
        return self.now_s


class StepCosts(Protocol):
    """Seconds of steps."""

    def step_s(
        self,
        num_decoding: int,
        num_draft_tokens: int,
        num_drafting: int | None = None,
        num_rows: int | None = None,
    ) -> float:
        """Return the seconds of a step.

        num_drafting: sequences with the drafts, None for all. num_rows: draft tokens of all
        sequences; None for num_draft_tokens each.
        """


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a step: weights are read once, and rows are computed at the same time.

    weights_s: time to read the weights.
    row_s: time to compute one row. The larger of the two counts, plus a fifth of the smaller.
    draft_s: time per draft token, for the whole batch.
    """

    weights_s: float
    row_s: float
    draft_s: float

    def step_s(
        self,
        num_decoding: int,
        num_draft_tokens: int,
        num_drafting: int | None = None,
        num_rows: int | None = None,
    ) -> float:
        """Return the seconds of a step, without noise; see StepCosts."""
        num_drafting = num_decoding if num_drafting is None else num_drafting
        num_rows = num_drafting * num_draft_tokens if num_rows is None else num_rows
        compute_s = self.row_s * (num_decoding + num_rows)
        large, small = max(compute_s, self.weights_s), min(compute_s, self.weights_s)
        return large + 0.2 * small + self.draft_s * num_draft_tokens

    def table(
        self, most: int, wrong_by: float = 1.0, wrong_part: WrongPart = "drafts"
    ) -> CostTable:
        """Return the table of a start-up measurement; `wrong_by` multiplies a part of its costs.

        wrong_part: drafts, with their rows; making them alone; rows; all; or all by the batch: not
            at all with one sequence, and with 256 by the whole factor.
        """
        sizes, lengths = (1, 4, 16, 64, 256), tuple(sorted({0, 1, most // 2, most}))
        by_part: dict[str, Callable[[int, int], float]] = {
            "drafts": lambda size, count: (
                wrong_by * self.step_s(size, count) + (1 - wrong_by) * self.step_s(size, 0)
            ),
            "making": replace(self, draft_s=wrong_by * self.draft_s).step_s,
            "rows": replace(self, row_s=wrong_by * self.row_s).step_s,
            "all": lambda size, count: wrong_by * self.step_s(size, count),
            "batch": lambda size, count: (
                wrong_by ** (math.log2(size) / 8) * self.step_s(size, count)
            ),
        }
        cost = by_part[wrong_part]
        seconds = tuple(tuple(cost(size, count) for count in lengths) for size in sizes)
        return CostTable(sizes, lengths, seconds)


class SyntheticService:
    """Simulated steps of a batch whose drafts are accepted at random."""

    def __init__(
        self,
        curve: StepCosts,
        acceptance: Sequence[float] | Callable[[float], Sequence[float]],
        clock: Clock,
        *,
        others: Sequence[Sequence[float]] = (),
        seed: int = 0,
        noise: float = 0.05,
        stall: float = 5.0,
    ) -> None:
        """Create the simulation.

        acceptance: probability by position, given those before; or a function of the time that
            returns it.
        others: of other kinds of sequences. Each row has all kinds in turn, a hundred steps each.
        noise: most by which a step is longer than the curve has it, as a share. stall: the same of
            every hundredth step, at random, as by load from another process.
        """
        self.curve = curve
        self.clock = clock
        self._acceptance = acceptance if callable(acceptance) else _constant(acceptance)
        self._others = others
        self._random = random.Random(seed)
        self._histories: list[AcceptanceHistory] = []  # by row
        self._noise = noise
        self._stall = stall
        self.num_tokens = 0
        self.expected_tokens = self.expected_s = 0.0  # of the same decisions, without chance
        self.num_steps = 0
        self.chosen: Counter[int] = Counter()  # number of steps by selected draft length

    def step(self, policy: SpeculationPolicy, num_decoding: int) -> int:
        """Run one step and return the number of draft tokens that the policy selected."""
        decision = policy.decide(num_decoding)
        count, limit = decision.num_draft_tokens, decision.num_drafting
        self.chosen[count] += 1
        drafted = (num_decoding if limit is None else min(limit, num_decoding)) if count else 0
        self._begin_sequences(num_decoding)
        lengths = [count] * drafted
        if decision.slots is not None:
            lengths = [decision.slots.length(each, count) for each in self._histories[:drafted]]
        all_rates = self._rates(num_decoding)
        rates = [own[:length] for own, length in zip(all_rates, lengths, strict=False)]
        num_rows = sum(lengths)
        policy.begin_step(
            drafted,
            drafted,
            has_prefill=False,
            num_slots=None if decision.slots is None else num_rows,
        )
        self.expected_tokens += num_decoding + sum(map(expected_accepted, rates))
        step_s = self.curve.step_s(num_decoding, count, drafted, num_rows)
        self.expected_s += step_s
        noise = 1 + self._noise * self._random.random()
        if self._random.random() < 0.01:
            noise += self._stall
        self.clock.now_s += noise * step_s
        accepted = list(map(self._num_accepted, rates))
        self.num_tokens += num_decoding + sum(accepted)
        for (length, found), num_alike in Counter(zip(lengths, accepted, strict=True)).items():
            policy.observe_rows(num_alike, count, length, found)
        for row, (length, found) in enumerate(zip(lengths, accepted, strict=True)):
            self._histories[row] = self._histories[row].after(length, found, KEPT_EVIDENCE)
        policy.end_step(lambda: self._histories[:num_decoding])
        self.num_steps += 1
        return count

    def _begin_sequences(self, num_decoding: int) -> None:
        """Forget the acceptance of sequences that have ended."""
        if len(self._histories) != num_decoding or self.num_steps % _STEPS_OF_SEQUENCE == 0:
            self._histories = [AcceptanceHistory()] * num_decoding

    def _rates(self, num_decoding: int) -> list[Sequence[float]]:
        """Return the acceptance of each row."""
        kinds = [self._acceptance(self.clock.now_s), *self._others]
        turn = self.num_steps // _STEPS_OF_SEQUENCE
        return [kinds[(row + turn) % len(kinds)] for row in range(num_decoding)]

    def _num_accepted(self, rates: Sequence[float]) -> int:
        accepted = 0
        while accepted < len(rates) and self._random.random() < rates[accepted]:
            accepted += 1
        return accepted

    def run(self, policy: SpeculationPolicy, num_decoding: int, seconds: float) -> float:
        """Run `num_decoding` streams for `seconds` and return the tokens per second."""
        start_s, before = self.clock.now_s, self.num_tokens
        while self.clock.now_s - start_s < seconds:
            self.step(policy, num_decoding)
        return (self.num_tokens - before) / (self.clock.now_s - start_s)


def expected_accepted(rates: Sequence[float]) -> float:
    """Return the expected number of accepted tokens of a draft with these probabilities."""
    return float(sum(accumulate(rates, mul)))


def auto_policy(
    clock: Callable[[], float],
    table: CostTable,
    most: int,
    threshold: int = 256,
    max_num_seqs: int = 1,
    *,
    verification: CostTable | None = None,
    most_padding_tokens: int = 0,
    divides_slots: bool = False,
) -> SpeculationPolicy:
    """Return the default policy: goodput, with a threshold that never limits it.

    table, verification, most_padding_tokens: as in CostModel.
    """
    costs = CostModel(table, verification=verification, most_padding_tokens=most_padding_tokens)
    chooser = GoodputChooser(costs, divides_slots=divides_slots)
    control = SpeculationControl("auto", threshold, most)
    return SpeculationPolicy(control, clock, choosers={None: chooser}, max_num_seqs=max_num_seqs)


def fixed_policy(clock: Callable[[], float], count: int) -> SpeculationPolicy:
    """Return a policy with the same number of draft tokens at all loads."""
    return SpeculationPolicy(SpeculationControl("on" if count else "off", 0, count), clock)


def _constant(acceptance: Sequence[float]) -> Callable[[float], Sequence[float]]:
    return lambda now_s: acceptance
