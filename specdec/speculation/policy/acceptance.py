"""Estimator of acceptance rates by draft position, over the recent past."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from specdec.types.draft_decision import DraftShape
from specdec.types.sampling_params import MAX_NUM_SPECULATIVE_TOKENS

_HALF_LIFE_S = 10.0
_DECAY_PERIOD_S = 0.1
_PRIOR_RATE = 0.7
_PRIOR_WEIGHT = 4.0
"""Weight of the prior, in drafts."""

_MOST_WEIGHT = 256.0
"""Most drafts in a position's window, so that the prior prevails again after a minute in which the
position is not reached."""

_LEAST_WEIGHT = 16.0
"""Decay keeps this weight of the first position: the estimate survives a pause, and a few new
drafts outweigh it."""


@dataclass
class _Position:
    """Decayed counts of the drafts verified and accepted at a position."""

    num_verified: float = 0.0
    num_accepted: float = 0.0

    def add(self, *, accepted: bool) -> None:
        self.num_verified += 1
        self.num_accepted += accepted
        self.scale(min(1.0, _MOST_WEIGHT / self.num_verified))

    def rate(self, prior: float) -> float:
        """Return the share of accepted drafts, with a prior."""
        weighed = self.num_accepted + _PRIOR_WEIGHT * prior
        return weighed / (self.num_verified + _PRIOR_WEIGHT)

    def scale(self, factor: float) -> None:
        self.num_verified *= factor
        self.num_accepted *= factor


class AcceptanceEstimator:
    """Acceptance rate by position, with exponential decay and a half-life of ten seconds.

    Position i counts as verified when a sequence was to draft i tokens or more and its first i - 1
    were accepted. A draft that ended before, such as that of a lookup without a match, counts as
    rejected there. Thus the expected yield does not depend on how drafts are made.

    The prior of a position is the rate of the position before it. Trees have separate positions,
    by depth; the prior there is the rate of chains, since a tree holds its best chain.
    """

    def __init__(self) -> None:
        self._positions = [_Position() for _ in range(MAX_NUM_SPECULATIVE_TOKENS)]
        self._depths = [_Position() for _ in range(MAX_NUM_SPECULATIVE_TOKENS)]
        self._decayed_at_s: float | None = None

    def record(
        self, num_asked: int, num_accepted: int, now_s: float, *, is_tree: bool = False
    ) -> None:
        """Record one sequence's step, in which it was to draft `num_asked` tokens in a row."""
        self._decay(now_s)
        positions = self._depths if is_tree else self._positions
        for index in range(min(num_asked, num_accepted + 1)):
            positions[index].add(accepted=index < num_accepted)

    def expected_tokens(self, shapes: Sequence[DraftShape], now_s: float) -> list[float]:
        """Return the expected output tokens a sequence and step, for each shape of drafts."""
        self._decay(now_s)
        rates = self._rates(max(shape.depth for shape in shapes))
        of_chains = _expected(rates)
        of_trees = of_chains
        if any(shape.is_tree for shape in shapes):
            of_trees = _expected(map(_Position.rate, self._depths, rates))
        return [
            of_trees[shape.depth] if shape.is_tree else of_chains[shape.depth] for shape in shapes
        ]

    def _rates(self, most: int) -> list[float]:
        """Return the rates of the first positions of chains."""
        rate, rates = _PRIOR_RATE, []
        for position in self._positions[:most]:
            rate = position.rate(rate)
            rates.append(rate)
        return rates

    def _decay(self, now_s: float) -> None:
        if self._decayed_at_s is None:
            self._decayed_at_s = now_s
        elapsed_s = now_s - self._decayed_at_s
        if elapsed_s < _DECAY_PERIOD_S:
            return
        self._decayed_at_s = now_s
        factor = 0.5 ** (elapsed_s / _HALF_LIFE_S)
        for positions in (self._positions, self._depths):
            first, *others = positions
            kept = min(first.num_verified, _LEAST_WEIGHT)
            if first.num_verified:
                first.scale(max(factor, kept / first.num_verified))
            for position in others:
                position.scale(factor)


def _expected(rates: Iterable[float]) -> list[float]:
    """Return the expected tokens of drafts by their depth, from 0 on, with the target's own."""
    reached = accumulate(rates, mul)
    return list(accumulate(reached, initial=1.0))
