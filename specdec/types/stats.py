"""Counts of drafted and accepted tokens, of one request or of all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

STRUCTURED_OUTPUT = "structured_output"
"""The drafting method that is counted where a grammar left a row only one continuation."""


@dataclass(frozen=True)
class SpeculationStats:
    """Counts of verified drafts, their tokens and the accepted ones.

    num_drafts: verified drafts, one per step and sequence. num_draft_tokens: tokens in them.
    num_accepted_tokens: those that became output.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @classmethod
    def sum(cls, stats: Iterable[SpeculationStats]) -> SpeculationStats:
        """Return the sum of all."""
        return reduce(cls.plus, stats, cls())

    def after_draft(self, num_draft_tokens: int, num_accepted_tokens: int) -> SpeculationStats:
        """Return the counts with one more verified draft; an empty draft is not counted."""
        if not num_draft_tokens:
            return self
        return SpeculationStats(
            self.num_drafts + 1,
            self.num_draft_tokens + num_draft_tokens,
            self.num_accepted_tokens + num_accepted_tokens,
        )

    def plus(self, other: SpeculationStats) -> SpeculationStats:
        """Return the sum of both."""
        return SpeculationStats(
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
        )

    def minus(self, before: SpeculationStats) -> SpeculationStats:
        """Return what was counted after the earlier snapshot `before`."""
        return SpeculationStats(
            self.num_drafts - before.num_drafts,
            self.num_draft_tokens - before.num_draft_tokens,
            self.num_accepted_tokens - before.num_accepted_tokens,
        )

    @property
    def acceptance_rate(self) -> float:
        """Accepted per drafted token; 0 when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a draft yields, the target's own included; 1 when nothing was drafted."""
        return 1 + (self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0)


class AcceptanceByPosition:
    """Counters of drafted and of accepted tokens at each draft position, first to last."""

    def __init__(self) -> None:
        self._drafted: list[int] = []
        self._accepted: list[int] = []

    def record(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Count one verified draft, of which a prefix was accepted."""
        num_new = num_draft_tokens - len(self._drafted)
        if num_new > 0:
            self._drafted.extend([0] * num_new)
            self._accepted.extend([0] * num_new)
        for position in range(num_draft_tokens):
            self._drafted[position] += 1
        for position in range(num_accepted_tokens):
            self._accepted[position] += 1

    @property
    def drafted(self) -> tuple[int, ...]:
        """Drafts that had a token at each position of the longest draft so far."""
        return tuple(self._drafted)

    @property
    def accepted(self) -> tuple[int, ...]:
        """Drafts whose token at each position was accepted."""
        return tuple(self._accepted)
