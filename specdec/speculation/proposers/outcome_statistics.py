"""How often each outcome of a row occurs, as observed.

An *outcome* of a row is the number of its drafts that are accepted and the token that the target
adds. The *fan-out* of a number of accepted drafts is how many tokens are tried for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul

from specdec.types.sampling.sampling_params import MAX_NUM_SPECULATIVE_TOKENS

MAX_FAN_OUT = 16
"""Most tokens to continue after one number of accepted drafts."""

_LEAST_PROBABILITY = 0.002
"""Outcomes that are rarer are not enumerated."""

_PRIOR_ACCEPTED = 0.7
_PRIOR_BEST = 0.4
_PRIOR_WEIGHT = 4.0
_MOST_WEIGHT = 512.0
"""Most observations of a rate; later ones replace the share of earlier ones."""


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


@dataclass(frozen=True)
class Likeliest:
    """The most likely outcomes of a row with `num_drafts`: the best token after all, then others.

    others: the number of accepted drafts of each other one, the likeliest first. hit_rates: the
        probability that the outcome is the first one, among the first two, and so on.
    """

    num_drafts: int
    others: tuple[int, ...]
    hit_rates: tuple[float, ...]

    def fan_out(self, num_branches: int) -> tuple[int, ...]:
        """Return the fan-out of the first `num_branches`, 1 or more."""
        counts = [0] * self.num_drafts + [1]
        for num_accepted in self.others[: num_branches - 1]:
            counts[num_accepted] += 1
        return tuple(counts)

    def hit_rate(self, num_branches: int) -> float:
        """Return the probability that the outcome is among the first `num_branches`."""
        return self.hit_rates[min(num_branches, len(self.hit_rates)) - 1]


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

    def likeliest(self, num_drafts: int, num_branches: int) -> Likeliest:
        """Return the `num_branches` most likely outcomes of a row, or fewer if others are rare.

        The best token after all drafts is always the first of them.
        """
        others = sorted(self._outcomes(num_drafts), reverse=True)[: max(0, num_branches - 1)]
        listed = [each for each in others if each[0] >= _LEAST_PROBABILITY]
        first = self._reached(num_drafts)[-1] * self._rank_rates(is_last=True)[0]
        hit_rates = tuple(accumulate((each for each, _ in listed), initial=first))
        return Likeliest(num_drafts, tuple(count for _, count in listed), hit_rates)

    def expected_tokens(self, num_drafts: int) -> list[float]:
        """Return the expected tokens that a row adds to its text, for 0 to `num_drafts` drafts."""
        return list(accumulate(self._survival(num_drafts)))

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
        survival = [*self._survival(num_drafts), 0.0]
        return [before - after for before, after in pairwise(survival)]

    def _survival(self, num_drafts: int) -> list[float]:
        """Return the probability that as many drafts are accepted, for 0 to `num_drafts`."""
        rate, rates = _PRIOR_ACCEPTED, []
        for each in self._accepted[:num_drafts]:
            rate = each.value(rate)
            rates.append(rate)
        return list(accumulate(rates, mul, initial=1.0))

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
