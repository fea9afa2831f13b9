"""Estimator of acceptance rates by draft position, over the recent past."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

    def scale(self, factor: float) -> None:
        self.num_verified *= factor
        self.num_accepted *= factor


class AcceptanceEstimator:
    """Acceptance rate by position, with exponential decay and a half-life of ten seconds.

    Position i counts as verified when a sequence was to draft i tokens or more and its first i - 1
    were accepted. A draft that ended before, such as that of a lookup without a match, counts as
    rejected there. Thus the expected yield does not depend on how drafts are made.

    The prior of a position is the rate of the position before it.
    """

    def __init__(self) -> None:
        self._positions = [_Position() for _ in range(MAX_NUM_SPECULATIVE_TOKENS)]
        self._decayed_at_s: float | None = None

    def record(self, num_asked: int, num_accepted: int, now_s: float) -> None:
        """Record one sequence's step, in which it was to draft `num_asked` tokens."""
        self._decay(now_s)
        for index in range(min(num_asked, num_accepted + 1)):
            self._positions[index].add(accepted=index < num_accepted)

    def expected_tokens(self, shapes: Sequence[DraftShape], now_s: float) -> list[float]:
        """Return the expected output tokens a sequence and step, for each shape of drafts."""
        self._decay(now_s)
        by_depth = self._expected_by_depth(max(shape.depth for shape in shapes))
        return [by_depth[shape.depth] for shape in shapes]

    def _expected_by_depth(self, most: int) -> list[float]:
        rate, reach, expected = _PRIOR_RATE, 1.0, [1.0]
        for position in self._positions[:most]:
            weighed = position.num_accepted + _PRIOR_WEIGHT * rate
            rate = weighed / (position.num_verified + _PRIOR_WEIGHT)
            reach *= rate
            expected.append(expected[-1] + reach)
        return expected

    def _decay(self, now_s: float) -> None:
        if self._decayed_at_s is None:
            self._decayed_at_s = now_s
        elapsed_s = now_s - self._decayed_at_s
        if elapsed_s < _DECAY_PERIOD_S:
            return
        self._decayed_at_s = now_s
        factor = 0.5 ** (elapsed_s / _HALF_LIFE_S)
        first, *others = self._positions
        kept = min(first.num_verified, _LEAST_WEIGHT)
        if first.num_verified:
            first.scale(max(factor, kept / first.num_verified))
        for position in others:
            position.scale(factor)
