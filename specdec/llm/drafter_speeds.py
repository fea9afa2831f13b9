"""Speeds of an alias's drafters, from rounds in which they take turns, and the choice by them.

How many draft tokens are accepted depends on model and text, and is in each drafter's card. What a
step costs depends on the machine, and is measured. Both together give the expected tokens per
second of one stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import harmonic_mean, median
from typing import Any

from specdec.config.model_aliases import ShippedDrafter
from specdec.models.drafters.card import SuiteAcceptance
from specdec.speculation.policy.cost_table import CostTable
from specdec.types.errors import InvalidValueError

MAX_SPREAD = 0.1
"""Largest spread of a measurement that is stored; see Gain."""

_MIN_ROUNDS, _ROUNDS, _MAX_ROUNDS = 3, 5, 15
_BUDGET_S = 12.0
"""No further round starts after it, except the first three."""

Acceptance = Mapping[str, Sequence[SuiteAcceptance]]
"""The cards of drafters by name, each with the same suites and temperatures."""


@dataclass(frozen=True)
class Candidate:
    """Drafters whose steps cost the same, and their measurement.

    names: of the drafters.
    """

    names: Sequence[str]
    measure: Callable[[], CostTable]


@dataclass(frozen=True)
class Gain:
    """Speed with a drafter, relative to none: the median of its rounds, and their range.

    low, high: of the rounds without the slowest and the fastest quarter.
    """

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, rounds: Sequence[float]) -> Gain:
        """Return the gain of some rounds."""
        ordered, dropped = sorted(rounds), len(rounds) // 4
        return cls(ordered[dropped], median(ordered), ordered[-1 - dropped])

    @property
    def spread(self) -> float:
        """The width of the range, relative to the median."""
        return (self.high - self.low) / self.median


@dataclass(frozen=True)
class DrafterSpeeds:
    """Speeds of one stream, by round.

    plain: tokens per second without drafts. gains: speed with each drafter, over that without.
    Raises InvalidValueError for fewer than three rounds.
    """

    plain: Sequence[float]
    gains: Mapping[str, Sequence[float]]

    def __post_init__(self) -> None:
        for name, rounds in {"plain": self.plain, **self.gains}.items():
            is_complete = len(rounds) == len(self.plain) >= _MIN_ROUNDS
            if not is_complete or not all(0 < each < math.inf for each in rounds):
                raise InvalidValueError(
                    name, rounds, "a number above 0 for each of at least 3 rounds"
                )

    @property
    def plain_tokens_per_s(self) -> float:
        """Tokens per second without drafts, the median of the rounds."""
        return median(self.plain)

    @property
    def by_name(self) -> dict[str, Gain]:
        """The gain of each drafter."""
        return {name: Gain.of(each) for name, each in self.gains.items()}

    @property
    def contenders(self) -> dict[str, Gain]:
        """The fastest drafter, and those that are as fast within the measured noise."""
        gains = self.by_name
        fastest = max(gains.values(), key=lambda each: each.median)
        return {name: each for name, each in gains.items() if each.high >= fastest.low}

    @property
    def spread(self) -> float:
        """The largest spread of a drafter that may be the fastest."""
        return max(gain.spread for gain in self.contenders.values())

    @property
    def is_settled(self) -> bool:
        """Return whether the rounds agree, so that the choice may be stored."""
        return self.spread <= MAX_SPREAD

    def choose(self, drafters: Sequence[ShippedDrafter]) -> ShippedDrafter:
        """Return the fastest drafter; of those within the noise a lookup, or else the first.

        It is the first of `drafters`, the default, where the rounds do not agree.
        """
        if not self.is_settled:
            return drafters[0]
        found = (each for each in drafters if each.name in self.contenders)
        return min(found, key=lambda each: each.has_weights)

    def describe(self, chosen: ShippedDrafter) -> str:
        """Return the choice and its gain in a line for the log."""
        if not self.is_settled:
            reason = f"speeds differ by {self.spread:.0%} between rounds, as under other load"
            return f"drafter {chosen.name}, the default: {reason}; they are not stored"
        gain = self.by_name[chosen.name].median
        return (
            f"drafter {chosen.name}: {gain:.2f} times the speed without drafts, "
            f"{gain * self.plain_tokens_per_s:.0f} tokens/s expected of one stream"
        )


def measure_rounds(
    candidates: Sequence[Candidate], acceptance: Acceptance, clock: Callable[[], float]
) -> DrafterSpeeds:
    """Measure all candidates in turn, five times, and further until the rounds agree.

    The rounds end in any case after fifteen, or after three once twelve seconds have passed.
    """
    started_at_s, plain = clock(), list[float]()
    gains: dict[str, list[float]] = {name: [] for name in acceptance}
    while True:
        tables = [each.measure() for each in candidates]
        plain.append(1 / min(each.step_s(1, 0) for each in tables))
        for each, table in zip(candidates, tables, strict=True):
            for name in each.names:
                gains[name].append(gain_of(table, acceptance[name]))
        is_late = clock() - started_at_s > _BUDGET_S
        if len(plain) < (_MIN_ROUNDS if is_late else _ROUNDS):
            continue
        speeds = DrafterSpeeds(plain, gains)
        if speeds.is_settled or is_late or len(plain) == _MAX_ROUNDS:
            return speeds


def comparable(acceptance: Acceptance) -> dict[str, list[SuiteAcceptance]]:
    """Return the suites and temperatures that all cards have."""
    common = set.intersection(*({each.cell for each in card} for card in acceptance.values()))
    return {
        name: [each for each in card if each.cell in common] for name, card in acceptance.items()
    }


def gain_of(costs: CostTable, suites: Sequence[SuiteAcceptance]) -> float:
    """Return the speed over all suites, relative to that without drafts; at least 1."""
    return harmonic_mean([best_speedup(costs, each) for each in suites])


def best_speedup(costs: CostTable, suite: SuiteAcceptance) -> float:
    """Return the speed with the best draft length, relative to none; at least 1.

    Relative to the same table, as other load on the machine may have changed between two tables.
    """
    plain_s = costs.step_s(1, 0)

    def speedup(count: int) -> float:
        share = suite.draft_share if count else 0.0
        step_s = share * costs.step_s(1, count) + (1 - share) * plain_s
        return suite.expected_tokens(count) * plain_s / step_s

    return max(map(speedup, range(1 + len(suite.accepted_per_step))))


def speeds_from(mapping: Mapping[str, Any], drafters: Sequence[ShippedDrafter]) -> DrafterSpeeds:
    """Return the speeds that JSON has, of these drafters. Raises ValueError and TypeError."""
    speeds = DrafterSpeeds(**mapping)
    names = [each.name for each in drafters]
    if set(speeds.gains) != set(names):
        raise InvalidValueError("gains", list(speeds.gains), f"those of {', '.join(names)}")
    return speeds
