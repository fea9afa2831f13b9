"""What an engine and its requests have come to, as plain numbers that can be added up."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import reduce
from itertools import accumulate, zip_longest
from typing import Any

from specdec.types.stats import SpeculationStats


@dataclass(frozen=True)
class HistogramCounts:
    """A histogram as plain numbers, to be added up.

    bounds: upper bounds of the buckets, ascending, without infinity. counts: observations in each
    bucket alone and, last, beyond all of them. total: sum of what was observed.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    def plus(self, other: HistogramCounts) -> HistogramCounts:
        """Both together; they must have the same buckets."""
        assert self.bounds == other.bounds, "histograms with different buckets"
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        return HistogramCounts(self.bounds, counts, self.total + other.total)

    def minus(self, before: HistogramCounts) -> HistogramCounts:
        """What was observed after `before`; it must have the same buckets."""
        assert self.bounds == before.bounds, "histograms with different buckets"
        counts = tuple(a - b for a, b in zip(self.counts, before.counts, strict=True))
        return HistogramCounts(self.bounds, counts, self.total - before.total)

    def quantile(self, share: float) -> float | None:
        """What `share` of the observations do not exceed; None where there are none.

        Within a bucket observations are taken to lie evenly, and those beyond all buckets at the
        last bound, as Prometheus' histogram_quantile does it.
        """
        ends = list(accumulate(self.counts))
        if ends[-1] == 0:
            return None
        rank = share * ends[-1]
        index = bisect_left(ends, rank)
        if index >= len(self.bounds):
            return self.bounds[-1]
        low, begin = (self.bounds[index - 1], ends[index - 1]) if index else (0.0, 0)
        if self.counts[index] == 0:  # only where the rank is 0
            return low
        return low + (self.bounds[index] - low) * (rank - begin) / self.counts[index]


@dataclass(frozen=True)
class Counts:
    """What only ever grows, since an engine, a replica or the control plane started.

    num_requests: that have come, each choice counted as one. accepted_by_position,
    drafted_by_position: draft tokens by their position in the draft, the first one first; the
    latter whether accepted or not; the same by_method, for what made the draft. decisions: steps by
    the reason of their decision. decided_lengths: by the number of draft tokens, 0 first.
    histograms: by name. ended: requests by why they ended. failed: calls by the code they ended in.
    num_cached_tokens to num_lookahead_tokens: as in specdec.types.stats. num_catch_up_tokens: of text
    that the draft model has run to catch up. num_target_restarts, num_draft_restarts: times that
    the model was made again. From decided_lengths on, HTTP alone tells them.
    """

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_steps: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    accepted_by_position: tuple[int, ...] = ()
    decisions: Mapping[str, int] = field(default_factory=dict)
    histograms: Mapping[str, HistogramCounts] = field(default_factory=dict)
    drafted_by_position: tuple[int, ...] = ()
    decided_lengths: tuple[int, ...] = ()
    drafted_by_method: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    accepted_by_method: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    ended: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, int] = field(default_factory=dict)
    num_cached_tokens: int = 0
    num_prefill_chunks: int = 0
    num_preemptions: int = 0
    num_lookahead_tokens: int = 0
    num_catch_up_tokens: int = 0
    num_target_restarts: int = 0
    num_draft_restarts: int = 0

    def plus(self, other: Counts) -> Counts:
        """Both together."""
        return self._with(other, _added)

    def minus(self, before: Counts) -> Counts:
        """What was counted after `before`, by the same."""
        return self._with(before, _taken_off)

    @classmethod
    def sum(cls, counts: Iterable[Counts]) -> Counts:
        """All together."""
        return reduce(cls.plus, counts, cls())

    def _with(self, other: Counts, combine: Callable[[Any, Any], Any]) -> Counts:
        """Field by field."""
        names = [each.name for each in fields(self)]
        return Counts(
            **{name: combine(getattr(self, name), getattr(other, name)) for name in names}
        )


@dataclass(frozen=True)
class ModelCounts:
    """How often each model was made again, and what the draft model has run to catch up."""

    num_target_restarts: int = 0
    num_draft_restarts: int = 0
    num_catch_up_tokens: int = 0


def _added(left: Any, right: Any) -> Any:
    """Both together, whatever they count: one may have positions or names that the other lacks."""
    match left:
        case HistogramCounts() | SpeculationStats():
            return left.plus(right)
        case tuple():
            return tuple(map(sum, zip_longest(left, right, fillvalue=0)))
        case Mapping():
            both = {name: _added(left[name], right[name]) for name in left.keys() & right.keys()}
            return {**left, **right, **both}
        case _:
            return left + right


def _taken_off(left: Any, right: Any) -> Any:
    """The left one without the right one, which has counted nothing that the left one has not."""
    match left:
        case HistogramCounts() | SpeculationStats():
            return left.minus(right)
        case tuple():
            return tuple(a - b for a, b in zip_longest(left, right, fillvalue=0))
        case Mapping():
            before = {name: _taken_off(left[name], right[name]) for name in right}
            return {**left, **before}
        case _:
            return left - right
