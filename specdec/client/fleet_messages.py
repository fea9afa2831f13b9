"""What replicas report of themselves, and what it comes to over all of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import accumulate, zip_longest

from specdec.client.admin_messages import SpeculationState
from specdec.stats import SpeculationStats


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
class DecisionNews:
    """A change of a replica's decision, by the clock of the wall. See specdec.decisions."""

    at: datetime
    num_draft_tokens: int
    reason: str
    num_decoding: int


@dataclass(frozen=True)
class Counts:
    """What only ever grows, since a replica or the control plane started.

    num_requests: that have come, each choice counted as one. accepted_by_position,
    drafted_by_position: draft tokens by their position in the draft, the first one first; the
    latter whether accepted or not. decisions: steps by the reason of their decision. histograms: by
    name.
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

    def plus(self, other: Counts) -> Counts:
        """Both together."""
        speculation = SpeculationStats()
        speculation.add(self.speculation)
        speculation.add(other.speculation)
        return Counts(
            self.num_requests + other.num_requests,
            self.num_prompt_tokens + other.num_prompt_tokens,
            self.num_generated_tokens + other.num_generated_tokens,
            self.num_steps + other.num_steps,
            speculation,
            _added(self.accepted_by_position, other.accepted_by_position),
            {
                name: self.decisions.get(name, 0) + other.decisions.get(name, 0)
                for name in sorted(self.decisions.keys() | other.decisions.keys())
            },
            _merged(self.histograms, other.histograms),
            _added(self.drafted_by_position, other.drafted_by_position),
        )

    def minus(self, before: Counts) -> Counts:
        """What was counted after `before`, by the same."""
        mine, theirs = self.speculation, before.speculation
        known = before.histograms
        return Counts(
            self.num_requests - before.num_requests,
            self.num_prompt_tokens - before.num_prompt_tokens,
            self.num_generated_tokens - before.num_generated_tokens,
            self.num_steps - before.num_steps,
            SpeculationStats(
                mine.num_drafts - theirs.num_drafts,
                mine.num_draft_tokens - theirs.num_draft_tokens,
                mine.num_accepted_tokens - theirs.num_accepted_tokens,
            ),
            _taken_off(self.accepted_by_position, before.accepted_by_position),
            {name: count - before.decisions.get(name, 0) for name, count in self.decisions.items()},
            {
                name: each.minus(known[name]) if name in known else each
                for name, each in self.histograms.items()
            },
            _taken_off(self.drafted_by_position, before.drafted_by_position),
        )

    @classmethod
    def sum(cls, counts: Iterable[Counts]) -> Counts:
        """All together."""
        total = cls()
        for each in counts:
            total = total.plus(each)
        return total


@dataclass(frozen=True)
class ReplicaReport:
    """What a replica says of itself.

    reason: why it is not ready; empty where it is. num_decoding: what the threshold is compared
    with. kv_cache_usage: share of the blocks taken, 0 to 1. is_speculation_on: whether a request
    that says nothing about it gets drafts now. speculation_version: of the state that it goes by;
    None before it has heard of one. num_chosen_tokens, decision_reason: how many tokens a sequence
    drafts a step, and why; empty before the first decision. decision_changes: the latest, the
    oldest first. counts: since it started. estimated_speedup: over no drafts, at the present batch;
    None where no costs are known.
    """

    replica_id: str
    is_ready: bool
    reason: str = ""
    num_running: int = 0
    num_waiting: int = 0
    num_decoding: int = 0
    kv_cache_usage: float = 0.0
    is_speculation_on: bool = False
    speculation_version: int | None = None
    num_chosen_tokens: int = 0
    decision_reason: str = ""
    decision_changes: tuple[DecisionNews, ...] = ()
    counts: Counts = field(default_factory=Counts)
    estimated_speedup: float | None = None


@dataclass(frozen=True)
class ReplicaStatus:
    """A replica as it last reported, `age_s` seconds ago."""

    report: ReplicaReport
    uptime_s: float
    age_s: float


@dataclass(frozen=True)
class ServiceStatus:
    """How the service runs.

    replicas: those heard of lately, the longest-running first. num_lost_replicas: those that failed
    or fell silent since the control plane started.
    """

    replicas: tuple[ReplicaStatus, ...]
    speculation: SpeculationState
    num_lost_replicas: int


@dataclass(frozen=True)
class FleetStatistics:
    """The service at one moment.

    requests_per_s: arrivals over all replicas and the last ten seconds. totals: since the control
    plane started, of the replicas that have ended too.
    """

    at: datetime
    status: ServiceStatus
    requests_per_s: float
    totals: Counts


def _added(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    """By position; the shorter one has zeros behind its end."""
    length = max(len(left), len(right))
    padded = ([*values, *[0] * (length - len(values))] for values in (left, right))
    return tuple(map(sum, zip(*padded, strict=True)))


def _taken_off(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    """By position; the left one is no shorter."""
    return tuple(a - b for a, b in zip_longest(left, right, fillvalue=0))


def _merged(
    left: Mapping[str, HistogramCounts], right: Mapping[str, HistogramCounts]
) -> dict[str, HistogramCounts]:
    merged = dict(left)
    for name, each in right.items():
        merged[name] = merged[name].plus(each) if name in merged else each
    return merged
