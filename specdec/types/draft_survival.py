"""Division of a step's draft tokens over its sequences by expected survival.

Sequences differ in how often their drafts are accepted. A draft token costs the target the same in
each of them, so the budget of a step goes to the tokens that are most likely to be accepted. All
shares follow from drafts that earlier steps have verified: see docs/speculation.md for the proof
that this is lossless with every verifier.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

_DECAY = 0.9
"""Share of the evidence that a step keeps: half of it is gone after seven steps."""

_PRIOR_RATE = 0.7
_PRIOR_WEIGHT = 4.0
"""Weight of the prior, in draft tokens. A sequence without a share returns to the prior, and so is
tried again."""


@dataclass(frozen=True)
class AcceptanceHistory:
    """Decayed counts of one sequence's draft tokens that were verified and accepted."""

    num_verified: float = 0.0
    num_accepted: float = 0.0

    def after(self, num_asked: int, num_accepted: int) -> AcceptanceHistory:
        """Return the history after a step in which `num_asked` tokens were to be drafted.

        Those behind the first rejected one are no evidence. A draft that ended before counts as
        rejected there: its proposer had nothing likely.
        """
        num_verified = min(num_asked, num_accepted + 1)
        return AcceptanceHistory(
            _DECAY * self.num_verified + num_verified, _DECAY * self.num_accepted + num_accepted
        )

    @property
    def rate(self) -> float:
        """Estimated probability, below 1, that a draft token is accepted if those before it are."""
        weighed = self.num_accepted + _PRIOR_RATE * _PRIOR_WEIGHT
        return weighed / (self.num_verified + _PRIOR_WEIGHT)


def share_by_survival(rates: Sequence[float], limits: Sequence[int], budget: int) -> list[int]:
    """Divide `budget` draft tokens so that the expected number of accepted ones is largest.

    rates: of each sequence, `AcceptanceHistory.rate`; its token j survives with probability
    rate ** j. limits: most tokens of each sequence. Of equal survivals the shorter draft, then the
    first sequence, takes the token.

    Survival decreases along a draft, so the greedy choice is optimal, and a token is never taken
    without those before it.
    """
    shares = [0] * len(rates)
    heap = [(-rate, 1, index) for index, rate in enumerate(rates) if limits[index] > 0]
    heapq.heapify(heap)
    for _ in range(min(budget, sum(limits))):
        survival, length, index = heap[0]
        shares[index] = length
        if length < limits[index]:
            heapq.heapreplace(heap, (survival * rates[index], length + 1, index))
        else:
            heapq.heappop(heap)
    return shares
