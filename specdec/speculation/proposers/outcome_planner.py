"""Plans what a draft model drafts ahead: which outcomes of a row, and how far behind each.

An *outcome* of a row is the number of its drafts that are accepted and the token that the target
adds. How many tokens to try for each number (the *fan-out*) follows from how often each number and
each rank occurs, as measured; the sum is limited to what the draft device completes within a step
of the target, as measured too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import NamedTuple

from specdec.types.draft_decision import DraftAhead
from specdec.types.draft_tree import MAX_TREE_NODES
from specdec.types.messages import DraftPass
from specdec.types.sampling_params import MAX_NUM_SPECULATIVE_TOKENS

MAX_FAN_OUT = 16
"""Most tokens to continue behind one number of accepted drafts."""

_FIRST_BRANCHES = 4
"""Outcomes of a row while the speed of neither device is known."""

_LEAST_PROBABILITY = 0.002
"""Outcomes that are rarer are not enumerated."""

_USED_SHARE = 0.9
"""Part of a step of the target within which the drafts ahead should be complete."""

_PRIOR_ACCEPTED = 0.7
_PRIOR_BEST = 0.4
_PRIOR_WEIGHT = 4.0
_MOST_WEIGHT = 512.0
"""Most observations of a rate; later ones replace the share of earlier ones."""

_KEPT = 0.95
"""Part of the weight of earlier passes and steps that a new one leaves."""


class RowPlan(NamedTuple):
    """What to draft behind one row; see AheadRow."""

    fan_out: tuple[int, ...]
    num_draft_tokens: int

    @property
    def num_drafts(self) -> int:
        """Drafts in flight."""
        return len(self.fan_out) - 1

    @property
    def num_nodes(self) -> int:
        """As in AheadRow."""
        return self.num_drafts + sum(self.fan_out) * self.num_draft_tokens

    def within(self, num_nodes: int) -> RowPlan | None:
        """Return the plan if it has at most `num_nodes`, else as much of one chain; or None."""
        if self.num_nodes <= num_nodes:
            return self
        count = min(self.num_draft_tokens, num_nodes - self.num_drafts)
        return RowPlan((0,) * self.num_drafts + (1,), count) if count > 0 else None


@dataclass
class _Rate:
    """Share of observations, with a prior; old ones lose weight."""

    num_trials: float = 0.0
    num_hits: float = 0.0

    def add(self, *, hit: bool) -> None:
        self.num_trials += 1
        self.num_hits += hit
        scale = min(1.0, _MOST_WEIGHT / self.num_trials)
        self.num_trials *= scale
        self.num_hits *= scale

    def value(self, prior: float) -> float:
        return (self.num_hits + _PRIOR_WEIGHT * prior) / (self.num_trials + _PRIOR_WEIGHT)


class OutcomeStatistics:
    """Probabilities of the outcomes of rows, from those that occurred.

    The rank of a token that was not enumerated is only known to be beyond those that were. So each
    rank has its rate among the rows in which no better one was right and this one was tried, which
    is the estimator of Kaplan and Meier (1958).
    """

    def __init__(self) -> None:
        self._accepted = [_Rate() for _ in range(MAX_NUM_SPECULATIVE_TOKENS)]
        self._after_rejection = [_Rate() for _ in range(MAX_FAN_OUT)]
        self._after_all = [_Rate() for _ in range(MAX_FAN_OUT)]

    def observe(self, num_drafts: int, num_accepted: int, rank: int | None, num_tried: int) -> None:
        """Record the outcome of a row with `num_drafts`.

        rank: of the target's token among the `num_tried` tokens that were enumerated for this
            number; None for another token.
        """
        for index in range(min(num_drafts, num_accepted + 1)):
            self._accepted[index].add(hit=index < num_accepted)
        ranks = self._after_all if num_accepted == num_drafts else self._after_rejection
        for index in range(num_tried if rank is None else rank + 1):
            ranks[index].add(hit=index == rank)

    def fan_out(self, num_drafts: int, num_branches: int) -> tuple[int, ...]:
        """Return the fan-out of the `num_branches` most likely outcomes.

        The best token behind all drafts is always among them.
        """
        best = sorted(self._outcomes(num_drafts), reverse=True)[: max(0, num_branches - 1)]
        counts = [0] * num_drafts + [1]
        for probability, num_accepted in best:
            if probability >= _LEAST_PROBABILITY:
                counts[num_accepted] += 1
        return tuple(counts)

    def hit_rate(self, fan_out: Sequence[int]) -> float:
        """Return the probability that a row's outcome is among those of a fan-out."""
        *inner, last = zip(self._reached(len(fan_out) - 1), fan_out, strict=True)
        rejected, whole = self._rank_rates(is_last=False), self._rank_rates(is_last=True)
        inner_rate = sum(reached * sum(rejected[:count]) for reached, count in inner)
        return inner_rate + last[0] * sum(whole[: last[1]])

    def _outcomes(self, num_drafts: int) -> Iterable[tuple[float, int]]:
        """Yield probability and number of accepted drafts of each outcome but the first."""
        *inner, last = self._reached(num_drafts)
        rejected, whole = self._rank_rates(is_last=False), self._rank_rates(is_last=True)
        for index, reached in enumerate(inner):
            yield from ((reached * rate, index) for rate in rejected)
        yield from ((last * rate, num_drafts) for rate in whole[1:])

    def _reached(self, num_drafts: int) -> list[float]:
        """Return the probability of each number of accepted drafts, 0 to `num_drafts`."""
        rate, rates = _PRIOR_ACCEPTED, []
        for each in self._accepted[:num_drafts]:
            rate = each.value(rate)
            rates.append(rate)
        survival = [*accumulate(rates, mul, initial=1.0), 0.0]
        return [before - after for before, after in pairwise(survival)]

    def _rank_rates(self, *, is_last: bool) -> list[float]:
        """Return the probability of each rank, in descending order."""
        ranks = self._after_all if is_last else self._after_rejection
        prior, left, rates = _PRIOR_ACCEPTED if is_last else _PRIOR_BEST, 1.0, [1.0]
        for rank in ranks:
            prior = rank.value(prior)
            rates.append(min(rates[-1], left * prior))
            left *= 1 - prior
            prior = min(prior, _PRIOR_BEST)
        return rates[1:]


class PassSpeed:
    """Seconds of a draft model's forward passes by their number of tokens: a line, fitted."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, each: DraftPass) -> None:
        """Record a pass."""
        x, y = float(each.num_tokens), each.seconds
        sums = (self._weight, self._x, self._y, self._xx, self._xy)
        added = (1.0, x, y, x * x, x * y)
        self._weight, self._x, self._y, self._xx, self._xy = (
            _KEPT * before + new for before, new in zip(sums, added, strict=True)
        )

    def seconds(self, num_tokens: int) -> float | None:
        """Return the expected seconds of a pass; None before the first one."""
        if not self._weight:
            return None
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        covariance = self._xy / self._weight - mean_x * mean_y
        slope = max(0.0, covariance / variance) if variance > 1e-9 else 0.0
        return max(0.0, mean_y + slope * (num_tokens - mean_x))


class OutcomePlanner:
    """Plans the drafts ahead of a batch, within the time of a step of the target."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """clock: monotonic, in seconds."""
        self.outcomes = OutcomeStatistics()
        self.speed = PassSpeed()
        self._clock = clock
        self._began_at_s: float | None = None
        self._target_s: float | None = None

    def begin_step(self) -> None:
        """Record that the target has received a step behind which the draft model drafts."""
        self._began_at_s = self._clock()

    def end_step(self, *, is_lost: bool = False) -> None:
        """Record that the results of that step are known, or will never be.

        Call it behind every step of the target, as soon as there are results: the time that passes
        until the next step is none of the target's.
        """
        began_at_s, self._began_at_s = self._began_at_s, None
        if began_at_s is None or is_lost:
            return
        seconds = self._clock() - began_at_s
        known = self._target_s
        self._target_s = seconds if known is None else _KEPT * known + (1 - _KEPT) * seconds

    def plan(self, rows: Sequence[tuple[int, int]], ahead: DraftAhead) -> list[RowPlan]:
        """Return what to draft behind each row.

        rows: the number of drafts of each, and the most tokens to draft behind an outcome, 1 or
            more.
        """
        if not rows:
            return []
        num_first = sum(1 + num_drafts for num_drafts, _ in rows)
        most = self._num_levels(len(rows), num_first, max(count for _, count in rows))
        per_row = 1
        if ahead is DraftAhead.OUTCOMES:
            per_row = max(1, self._num_tokens(num_first, most, len(rows)) // len(rows))
        sizes = [(num_drafts, min(count, most)) for num_drafts, count in rows]
        plans = {size: self._row_plan(*size, per_row) for size in set(sizes)}
        return [plans[size] for size in sizes]

    def _row_plan(self, num_drafts: int, num_draft_tokens: int, num_branches: int) -> RowPlan:
        """Return the plan of one row, whose tree has room for at most MAX_TREE_NODES."""
        room = (MAX_TREE_NODES - num_drafts) // num_draft_tokens
        fan_out = self.outcomes.fan_out(num_drafts, max(1, min(num_branches, room)))
        return RowPlan(fan_out, num_draft_tokens)

    def _num_levels(self, num_rows: int, num_first: int, wanted: int) -> int:
        """Return how many tokens there is time for behind one outcome of each row."""
        limit_s, first_s = self._limit_s, self.speed.seconds(num_first)
        level_s = self.speed.seconds(num_rows)
        if limit_s is None or first_s is None or not level_s:
            return wanted
        return max(1, min(wanted, int((limit_s - first_s) / level_s)))

    def _num_tokens(self, num_first: int, num_levels: int, num_rows: int) -> int:
        """Return how many tokens a pass may have, so that there is time for `num_levels`."""
        limit_s, first_s = self._limit_s, self.speed.seconds(num_first)
        if limit_s is None or first_s is None:
            return _FIRST_BRANCHES * num_rows
        low, high = num_rows, num_rows * MAX_TREE_NODES
        while low < high:
            middle = (low + high + 1) // 2
            level_s = self.speed.seconds(middle) or 0.0
            if first_s + num_levels * level_s <= limit_s:
                low = middle
            else:
                high = middle - 1
        return low

    @property
    def _limit_s(self) -> float | None:
        return None if self._target_s is None else _USED_SHARE * self._target_s
