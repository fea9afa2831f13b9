"""What replicas report of themselves, and what it comes to over all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

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

    num_requests: that have come, each choice counted as one. accepted_by_position: of draft tokens,
    the first position first. decisions: steps by the reason of their decision. histograms: by name.
    """

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_steps: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    accepted_by_position: tuple[int, ...] = ()
    decisions: Mapping[str, int] = field(default_factory=dict)
    histograms: Mapping[str, HistogramCounts] = field(default_factory=dict)

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
    oldest first. counts: since it started.
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


def _merged(
    left: Mapping[str, HistogramCounts], right: Mapping[str, HistogramCounts]
) -> dict[str, HistogramCounts]:
    merged = dict(left)
    for name, each in right.items():
        merged[name] = merged[name].plus(each) if name in merged else each
    return merged
