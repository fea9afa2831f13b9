"""Statistical test for a version of a draft head that is worse than the one before it.

Versions are compared by their first draft tokens: whether these are accepted does not depend on how
many tokens are drafted, which changes with load. The test is the pooled z-test of two proportions,
at few points: after each doubling of the number of drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import sqrt


@dataclass(frozen=True)
class FirstTokens:
    """Drafts of a version, and those of them whose first token was accepted."""

    num_drafts: int
    num_accepted: int

    @property
    def acceptance(self) -> float:
        """The accepted share; 0 without a draft."""
        return self.num_accepted / self.num_drafts if self.num_drafts else 0.0


@dataclass(frozen=True)
class RollbackRule:
    """Sequential test whether a version accepts less than the one before it.

    min_drafts: of each version, before the first look. window: drafts of the new version after
    which it is no longer compared, and latest drafts of the old one that count. Later looks would
    compare the traffic of different times. threshold: of z. margin: a smaller loss of acceptance is
    ignored.

    With independent drafts of an equally good version, a look gives a false alarm with probability
    P(z < -4) = 3.2e-5: 1.6e-4 in five looks. Drafts of a stream are alike; where they count as half
    as many independent ones, z is sqrt(2) times too large, and the probability below 1.2 %. A false
    alarm costs the gain of the version, never a token.
    """

    min_drafts: int = 64
    window: int = 1024
    threshold: float = 4.0
    margin: float = 0.02

    @cached_property
    def looks(self) -> frozenset[int]:
        """The numbers of drafts of the new version after which it is compared."""
        looks, count = set[int](), self.min_drafts
        while count <= self.window:
            looks.add(count)
            count *= 2
        return frozenset(looks)

    def is_worse(self, before: FirstTokens, now: FirstTokens) -> bool:
        """Return whether a version is worse than the one before; False where it is not known."""
        if min(before.num_drafts, now.num_drafts) < self.min_drafts:
            return False
        loss = before.acceptance - now.acceptance
        if loss <= self.margin:
            return False
        num_drafts = before.num_drafts + now.num_drafts
        pooled = (before.num_accepted + now.num_accepted) / num_drafts
        variance = pooled * (1 - pooled) * (1 / before.num_drafts + 1 / now.num_drafts)
        return loss > self.threshold * sqrt(variance)
