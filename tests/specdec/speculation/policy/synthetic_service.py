"""Simulated target and drafter with given cost and acceptance, on a simulated clock.

A policy can run minutes of service in moments, and can be compared with fixed draft lengths.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Protocol

from specdec.speculation.policy.cost_model import CostModel, CostTable
from specdec.speculation.policy.goodput import GoodputChooser
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.types.control import SpeculationControl

_STEPS_OF_SEQUENCE = 100


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
        self, num_decoding: int, num_draft_tokens: int, num_drafting: int | None = None
    ) -> float:
        """Return the seconds of a step; num_drafting: sequences with the drafts, None for all."""


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
        self, num_decoding: int, num_draft_tokens: int, num_drafting: int | None = None
    ) -> float:
        """Return the seconds of a step, without noise.

        num_drafting: sequences with the draft tokens; None for all.
        """
        num_drafting = num_decoding if num_drafting is None else num_drafting
        compute_s = self.row_s * (num_decoding + num_drafting * num_draft_tokens)
        large, small = max(compute_s, self.weights_s), min(compute_s, self.weights_s)
        return large + 0.2 * small + self.draft_s * num_draft_tokens

    def table(self, most: int, wrong_by: float = 1.0) -> CostTable:
        """Return the table of a start-up measurement; `wrong_by` multiplies the cost of drafts."""
        sizes, lengths = (1, 4, 16, 64, 256), tuple(sorted({0, 1, most // 2, most}))
        plain = [self.step_s(size, 0) for size in sizes]
        seconds = tuple(
            tuple(base + wrong_by * (self.step_s(size, count) - base) for count in lengths)
            for size, base in zip(sizes, plain, strict=True)
        )
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
        policy.begin_step(drafted, drafted, has_prefill=False)
        rates = [own[:count] for own in self._rates(num_decoding)[:drafted]]
        self.expected_tokens += num_decoding + sum(map(expected_accepted, rates))
        self.expected_s += self.curve.step_s(num_decoding, count, drafted)
        noise = 1 + self._noise * self._random.random()
        if self._random.random() < 0.01:
            noise += self._stall
        self.clock.now_s += noise * self.curve.step_s(num_decoding, count, drafted)
        results = Counter(map(self._num_accepted, rates))
        self.num_tokens += num_decoding
        for accepted, num_rows in results.items():
            self.num_tokens += num_rows * accepted
            policy.observe_rows(num_rows, count, count, accepted)
        policy.end_step()
        self.num_steps += 1
        return count

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
    full_batch: int = 1,
) -> SpeculationPolicy:
    """Return the default policy: goodput, with a threshold that never limits it."""
    chooser = GoodputChooser(CostModel(table))
    control = SpeculationControl("auto", threshold, most)
    return SpeculationPolicy(control, clock, choosers={None: chooser}, full_batch=full_batch)


def fixed_policy(clock: Callable[[], float], count: int) -> SpeculationPolicy:
    """Return a policy with the same number of draft tokens at all loads."""
    return SpeculationPolicy(SpeculationControl("on" if count else "off", 0, count), clock)


def _constant(acceptance: Sequence[float]) -> Callable[[float], Sequence[float]]:
    return lambda now_s: acceptance
