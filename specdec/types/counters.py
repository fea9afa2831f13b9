"""Counters of an engine and its requests, as plain numbers that can be added."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import accumulate
from typing import Any

from specdec.types.stats import AcceptanceByPosition, Additive, SpeculationStats, added


@dataclass(frozen=True)
class HistogramCounts(Additive):
    """Snapshot of a histogram that can be added to others with the same buckets.

    bounds: upper bounds of the buckets, ascending, without infinity. counts: observations in each
    bucket (not cumulative), then those above the last bound. total: sum of the observations.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    def _combined(
        self, other: HistogramCounts, combine: Callable[[Any, Any], Any]
    ) -> HistogramCounts:
        assert self.bounds == other.bounds, "histograms with different buckets"
        counts, total = combine(self.counts, other.counts), combine(self.total, other.total)
        return HistogramCounts(self.bounds, counts, total)

    def quantile(self, share: float) -> float | None:
        """Return the quantile `share`, from 0 to 1; None without observations.

        Interpolates linearly within a bucket and returns the last bound for observations above it,
        like Prometheus' histogram_quantile.
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


@dataclass
class Counts(Additive):
    """Counters of an engine, a replica or a fleet since its start; they only grow and can be added.

    Each part fills in the fields it counts, and `plus` merges the parts: the engine and its
    scheduler (tokens, steps, drafts, decisions), `Metrics` (requests and histograms) and the
    executor (restarts). A new counter is a field here and a metric in `engine_metrics`.

    num_requests: received requests, each choice counted as one.
    accepted_by_position, drafted_by_position: draft tokens by position, first to last; drafted
        tokens whether accepted or not. drafted_by_method, accepted_by_method: the same for each
        drafting method, STRUCTURED_OUTPUT included.
    decisions: steps by the reason of their decision. decided_lengths: steps by the number of draft
        tokens, 0 first.
    histograms: by metric name. ended: requests by finish reason. failed: calls by gRPC status code.
    num_cached_tokens: prompt tokens found in the prefix cache.
    num_prefill_chunks: rows that left a part of the prompt uncomputed.
    num_lookahead_tokens: guesses run behind the drafts by lookahead decoding.
    num_catch_up_tokens: tokens that the draft model computed to catch up.
    num_target_restarts, num_draft_restarts: restarts of each model's workers.

    Fields from decided_lengths on are exported over HTTP only.
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


class DraftCounter:
    """Counter of verified drafts by drafting method and position.

    Nothing else is counted per row: totals over methods and positions are summed up when read.
    """

    def __init__(self) -> None:
        self._by_method: dict[str, AcceptanceByPosition] = {}

    def record(self, method: str, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Count one verified draft; an empty draft is not counted."""
        if num_draft_tokens:
            by_position = self._by_method.setdefault(method, AcceptanceByPosition())
            by_position.record(num_draft_tokens, num_accepted_tokens)

    def added_to(self, counts: Counts) -> Counts:
        """Return a copy of `counts` with the fields about drafts filled in."""
        drafted_by_method = {name: each.drafted for name, each in self._by_method.items()}
        accepted_by_method = {name: each.accepted for name, each in self._by_method.items()}
        drafted: tuple[int, ...] = reduce(added, drafted_by_method.values(), ())
        accepted: tuple[int, ...] = reduce(added, accepted_by_method.values(), ())
        num_drafts = sum(drafted[:1])  # every draft has a first token
        return replace(
            counts,
            speculation=SpeculationStats(num_drafts, sum(drafted), sum(accepted)),
            drafted_by_position=drafted,
            accepted_by_position=accepted,
            drafted_by_method=drafted_by_method,
            accepted_by_method=accepted_by_method,
        )
