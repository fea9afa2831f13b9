"""Division of a step's draft tokens over its sequences by expected survival.

Sequences differ in how often their drafts are accepted. A draft token costs the target the same in
each of them, so the budget of a step goes to the tokens that are most likely to be accepted. All
shares follow from drafts that earlier steps have verified, or from a head's confidences in drafts
that it made at the end of the last step: see docs/speculation.md for the proofs that this is
lossless with every verifier.
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

_MOST_RATE = 0.99
"""Below 1, so that of equally confident drafts the longer one yields."""


@dataclass(frozen=True)
class AcceptanceHistory:
    """Decayed counts of one sequence's draft tokens that were verified and accepted."""

    num_verified: float = 0.0
    num_accepted: float = 0.0

    def after(self, num_asked: int, num_accepted: int, kept: float = _DECAY) -> AcceptanceHistory:
        """Return the history after a step in which `num_asked` tokens were to be drafted.

        Those after the first rejected one are no evidence. A draft that ended before counts as
        rejected there: its proposer had nothing likely. kept: share of the evidence before.
        """
        num_verified = min(num_asked, num_accepted + 1)
        return AcceptanceHistory(
            kept * self.num_verified + num_verified, kept * self.num_accepted + num_accepted
        )

    @property
    def rate(self) -> float:
        """Estimated probability, below 1, that a draft token is accepted if those before it are."""
        weighed = self.num_accepted + _PRIOR_RATE * _PRIOR_WEIGHT
        return weighed / (self.num_verified + _PRIOR_WEIGHT)


@dataclass(frozen=True)
class ConfidenceHistory:
    """Decayed sums over one sequence's verified draft tokens: of confidences, and of accepted ones.

    Their ratio corrects confidences of a drafter that is too sure, or not sure enough, of its
    tokens.
    """

    num_expected: float = 0.0
    num_accepted: float = 0.0

    def after(self, confidences: Sequence[float], num_accepted: int) -> ConfidenceHistory:
        """Return the history after a step that verified draft tokens of these confidences.

        Those after the first rejected one are no evidence.
        """
        seen = confidences[: num_accepted + 1]
        return ConfidenceHistory(
            _DECAY * self.num_expected + sum(seen),
            _DECAY * self.num_accepted + min(num_accepted, len(seen)),
        )

    def rate(self, confidence: float) -> float:
        """Return the estimate of `AcceptanceHistory.rate` for a draft token of this confidence."""
        above, below = self.num_accepted + _PRIOR_WEIGHT, self.num_expected + _PRIOR_WEIGHT
        return min(_MOST_RATE, confidence * above / below)


def share_by_survival(rates: Sequence[Sequence[float]], budget: int) -> list[int]:
    """Divide `budget` draft tokens so that the expected number of accepted ones is largest.

    rates: for each sequence and each token that it may draft, the probability, below 1, that the
    token is accepted if those before it are; it survives with the product up to it. Of equal
    survivals the shorter draft, then the first sequence, takes the token.

    Survival decreases along a draft, so the greedy choice is optimal, and a token is never taken
    without those before it.
    """
    shares = [0] * len(rates)
    heap = [(-own[0], 1, index) for index, own in enumerate(rates) if own]
    heapq.heapify(heap)
    for _ in range(min(budget, sum(map(len, rates)))):
        survival, length, index = heap[0]
        shares[index] = length
        if length < len(rates[index]):
            heapq.heapreplace(heap, (survival * rates[index][length], length + 1, index))
        else:
            heapq.heappop(heap)
    return shares
