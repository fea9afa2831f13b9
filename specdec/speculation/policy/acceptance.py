"""Estimator of acceptance rates by draft position, over the recent past."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from math import prod
from operator import mul

from specdec.types.drafts.draft_decision import DraftAhead, DraftShape
from specdec.types.sampling.sampling_params import MAX_NUM_SPECULATIVE_TOKENS

_HALF_LIFE_S = 10.0
_DECAY_PERIOD_S = 0.1
_PRIOR_RATE = 0.7
_PRIOR_WEIGHT = 4.0
"""Weight of the prior, in drafts."""

_MOST_WEIGHT = 256.0
"""Most drafts in a position's window, so that the prior prevails again after a minute in which the
position is not reached."""

_PRIOR_LISTED = 0.9
_PRIOR_LISTED_REJECTED = 0.6
"""Prior probability that the target's token is among those tried, after a whole draft and after a
rejection."""

_SHARED_WEIGHT = 32.0
"""Weight of the acceptance of all chains as the prior of those that were made ahead: more than what
is kept of a short trial."""

_LEAST_WEIGHT = 16.0
"""Decay keeps this weight of the first position: the estimate survives a pause, and a few new
drafts outweigh it."""


@dataclass
class _Position:
    """Decayed counts of the drafts verified and accepted at a position."""

    num_verified: float = 0.0
    num_accepted: float = 0.0

    def add(self, *, accepted: bool, count: int = 1) -> None:
        self.num_verified += count
        self.num_accepted += count * accepted

    def limit(self) -> None:
        """Limit the weight, once all sequences of a step are counted, so that all count alike."""
        if self.num_verified > _MOST_WEIGHT:
            self.scale(_MOST_WEIGHT / self.num_verified)

    def rate(self, prior: float, weight: float = _PRIOR_WEIGHT) -> float:
        """Return the share of accepted drafts, with a prior of some weight."""
        weighed = self.num_accepted + weight * prior
        return weighed / (self.num_verified + weight)

    def scale(self, factor: float) -> None:
        self.num_verified *= factor
        self.num_accepted *= factor

    def decay(self, factor: float) -> None:
        """Lose weight, but keep _LEAST_WEIGHT of it."""
        if self.num_verified > _LEAST_WEIGHT:
            self.scale(max(factor, _LEAST_WEIGHT / self.num_verified))


class _AheadChains:
    """Chains of one kind that were made ahead, by position.

    drafted: whether they reach a position, among those whose drafts before it were all accepted.
    accepted: of those that do.
    """

    def __init__(self) -> None:
        self.drafted = _positions()
        self.accepted = _positions()

    def add(self, num_asked: int, num_drafted: int, num_accepted: int) -> None:
        """Record a chain."""
        for index in range(min(num_asked, num_accepted + 1)):
            self.drafted[index].add(accepted=index < num_drafted)
        _add(self.accepted, min(num_asked, num_drafted), num_accepted)

    def rates(self, of_chains: Iterable[float]) -> list[float]:
        """Return the share of chains with an accepted draft at each position, if at those before.

        of_chains: acceptance of all chains.
        """
        return [
            drafted.rate(1.0) * accepted.rate(rate, _SHARED_WEIGHT)
            for drafted, accepted, rate in zip(self.drafted, self.accepted, of_chains, strict=False)
        ]


class AcceptanceEstimator:
    """Acceptance rate by position, with exponential decay and a half-life of ten seconds.

    Position i counts as verified when a sequence was to draft i tokens or more and its first i - 1
    were accepted. A draft that ended before, such as that of a lookup without a match, counts as
    rejected there. Thus the expected yield does not depend on how drafts are made.

    The prior of a position is the rate of the position before it. Trees have separate positions,
    by size and depth. The prior of the largest there is the rate of chains, since a tree holds its
    best chain; of others the mean of that and of the rate of the next larger one.

    Chains that are made ahead have a hit rate by shape: the share of rows that had a draft in time.
    Those that had one are evidence about all chains, since the same model has drafted them. Two
    things are separate: how far they reach, since there may be no time for all of their tokens, and
    by how much their acceptance differs from that of all chains. What was measured of drafts ahead
    keeps a weight: the priors of their hit rates are high, and forgetting would lead back to shapes
    that were slower.
    """

    def __init__(self) -> None:
        self._chains = _positions()
        self._ahead: dict[DraftAhead, _AheadChains] = {
            kind: _AheadChains() for kind in DraftAhead if kind is not DraftAhead.OFF
        }
        self._trees = defaultdict[int, list[_Position]](_positions)  # by size, then by depth
        self._hits: dict[DraftShape, _Position] = {}
        self._decayed_at_s: float | None = None
        self._recorded_at_s = -math.inf

    def record(
        self,
        num_asked: int,
        num_accepted: int,
        now_s: float,
        tree_size: int = 0,
        *,
        num_drafts: int = 1,
    ) -> None:
        """Record steps of sequences that were to draft `num_asked` tokens in a row.

        tree_size: tokens of the trees; 0 for chains.
        """
        self._decay(now_s)
        positions = self._trees[tree_size] if tree_size else self._chains
        _add(positions, num_asked, num_accepted, num_drafts)

    def record_ahead(
        self,
        shape: DraftShape,
        num_asked: int,
        num_drafted: int,
        num_accepted: int,
        now_s: float,
        *,
        is_hit: bool,
    ) -> None:
        """Record one sequence's step of a shape with drafts ahead.

        num_drafted: 0 where there was no draft in time. is_hit: whether it was made ahead.
        """
        self._decay(now_s)
        self._hits.setdefault(shape, _Position()).add(accepted=is_hit)
        if num_drafted:
            _add(self._chains, min(num_asked, num_drafted), num_accepted)
        if is_hit:
            self._ahead[shape.ahead].add(num_asked, num_drafted, num_accepted)

    def hit_rate(self, shape: DraftShape, *, waits: bool = False) -> float:
        """Return the share of rows that have a draft in time, of a shape with drafts ahead.

        waits: whether a row without one waits for a draft.
        """
        prior = _steady_hit_rate(shape, self._rates(shape.depth + 1), waits=waits)
        return self._hits.get(shape, _Position()).rate(prior)

    def tokens_of_hit(self, shape: DraftShape) -> float:
        """Return the expected output tokens of a row with a draft that was made ahead."""
        return _expected(self._ahead[shape.ahead].rates(self._rates(shape.depth)))[-1]

    def expected_tokens(self, shapes: Sequence[DraftShape], now_s: float) -> list[float]:
        """Return the expected output tokens a sequence and step, for each shape of drafts."""
        self._decay(now_s)
        rates = self._rates(max(shape.depth for shape in shapes))
        by_size = {0: _expected(rates)}
        wanted = {shape.num_draft_tokens for shape in shapes if shape.is_tree}
        prior = rates
        for size in sorted(wanted | self._trees.keys(), reverse=True) if wanted else ():
            own = list(map(_Position.rate, self._trees[size], prior))
            by_size[size] = _expected(own)
            prior = [(low + high) / 2 for low, high in zip(rates, own, strict=True)]
        return [
            1 + self.hit_rate(shape) * (self.tokens_of_hit(shape) - 1)
            if shape.ahead is not DraftAhead.OFF
            else by_size[shape.num_draft_tokens if shape.is_tree else 0][shape.depth]
            for shape in shapes
        ]

    def _rates(self, most: int) -> list[float]:
        """Return the rates of the first positions of chains."""
        rate, rates = _PRIOR_RATE, []
        for position in self._chains[:most]:
            rate = position.rate(rate)
            rates.append(rate)
        return rates

    @property
    def _of_ahead(self) -> Iterator[_Position]:
        """The positions of drafts ahead."""
        yield from (each for own in self._ahead.values() for each in (*own.drafted, *own.accepted))
        yield from self._hits.values()

    def _limit(self) -> None:
        of_ahead = self._of_ahead if self._hits else ()
        for position in chain(self._chains, *self._trees.values(), of_ahead):
            position.limit()

    def _decay(self, now_s: float) -> None:
        if now_s != self._recorded_at_s:
            self._recorded_at_s = now_s
            self._limit()
        if self._decayed_at_s is None:
            self._decayed_at_s = now_s
        elapsed_s = now_s - self._decayed_at_s
        if elapsed_s < _DECAY_PERIOD_S:
            return
        self._decayed_at_s = now_s
        factor = 0.5 ** (elapsed_s / _HALF_LIFE_S)
        for positions in (self._chains, *self._trees.values()):
            first, *others = positions
            first.decay(factor)
            for position in others:
                position.scale(factor)
        for position in self._of_ahead:
            position.decay(factor)


def _positions() -> list[_Position]:
    return [_Position() for _ in range(MAX_NUM_SPECULATIVE_TOKENS)]


def _add(
    positions: Sequence[_Position], num_asked: int, num_accepted: int, num_drafts: int = 1
) -> None:
    for index in range(min(num_asked, num_accepted + 1)):
        positions[index].add(accepted=index < num_accepted, count=num_drafts)


def _steady_hit_rate(shape: DraftShape, rates: Sequence[float], *, waits: bool) -> float:
    """Return the prior of a hit rate, by the acceptance of the draft tokens.

    A row with a draft is followed by a hit with one probability, a row without one with another;
    the hit rate is the share of rows with a draft that this leads to. Where a row without one waits
    for a draft, every row has one. Continuing hits if all drafts and the token after them were
    right. Outcomes also hit after a rejection, if one of the next best tokens was right; the
    constants are rough, and only hold until there is evidence.

    rates: [depth + 1].
    """
    *drafted, of_next = rates
    all_accepted = prod(drafted)
    after_draft, after_none = all_accepted * of_next, rates[0]
    if shape.ahead is DraftAhead.OUTCOMES:
        last = max(of_next, _PRIOR_LISTED)
        after_draft = all_accepted * last + (1 - all_accepted) * _PRIOR_LISTED_REJECTED
        after_none = max(rates[0], _PRIOR_LISTED)
    return after_draft if waits else after_none / (1 - after_draft + after_none)


def _expected(rates: Iterable[float]) -> list[float]:
    """Return the expected tokens of drafts by their depth, from 0 on, with the target's own."""
    reached = accumulate(rates, mul)
    return list(accumulate(reached, initial=1.0))
