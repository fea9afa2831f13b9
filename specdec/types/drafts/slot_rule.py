"""Rule for the slots of a step: a draft token is verified if it is likely enough to be accepted.

The lengths that follow from it depend on drafts that earlier steps have verified, and on times. See
docs/speculation.md for the proof that this is lossless with every verifier.
"""

from __future__ import annotations

from math import log
from typing import NamedTuple

from specdec.types.drafts.draft_survival import AcceptanceHistory


class SlotRule(NamedTuple):
    """Least survival of a draft token, and the prior of the rate by which it is estimated.

    least_survival: above 0 and below 1. rate, weight: of the prior, see `rate_of`.
    """

    least_survival: float
    rate: float
    weight: float

    def rate_of(self, history: AcceptanceHistory) -> float:
        """Return a sequence's acceptance rate: its own, and the prior with a weight in tokens."""
        accepted = history.num_accepted + self.weight * self.rate
        return accepted / (history.num_verified + self.weight)

    def length(self, history: AcceptanceHistory, most: int) -> int:
        """Return how many draft tokens survive often enough, at most `most`."""
        rate = self.rate_of(history)
        return min(most, num_surviving(rate, self.least_survival)) if rate < 1 else most


def num_surviving(rate: float, least_survival: float) -> int:
    """Return the length up to which a draft is accepted with a probability of `least_survival`."""
    return int(log(least_survival) / log(rate) + 1e-9) if rate > 0 else 0
