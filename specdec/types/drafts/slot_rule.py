"""Rule for the slots of a step: a draft token is verified if it is likely enough to be accepted.

The lengths that follow from it depend on drafts that earlier steps have verified, and on times. See
docs/speculation.md for the proof that this is lossless with every verifier.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from specdec.types.drafts.draft_survival import AcceptanceHistory

KEPT_EVIDENCE = 0.95
"""Share of the evidence about a sequence that a step keeps: half of it is gone after 14 steps."""


class SlotRule(NamedTuple):
    """Least survival of a draft token, and the prior of the rate by which it is estimated.

    least_survival: above 0 and below 1. prior: see `survivals`.
    """

    least_survival: float
    prior: AcceptanceHistory

    def length(self, history: AcceptanceHistory, most: int) -> int:
        """Return how many draft tokens survive often enough, at most `most`."""
        length = 0
        for survival in survivals(history, self.prior, most):
            if survival < self.least_survival:
                break
            length += 1
        return length


def survivals(history: AcceptanceHistory, prior: AcceptanceHistory, most: int) -> Iterator[float]:
    """Yield the probability that each of the first `most` draft tokens is accepted.

    The acceptance rate of a sequence has a beta distribution, by the counts of the prior, which are
    above 0, and its own. What is not known about the rate adds to the survival of later tokens,
    which only sequences with a high rate reach.
    """
    accepted = history.num_accepted + prior.num_accepted
    verified = history.num_verified + prior.num_verified
    survival = 1.0
    for index in range(most):
        survival *= (accepted + index) / (verified + index)
        yield survival
