"""What a chart shows of the fleet at one moment, from what replicas have counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from cluster.histogram import HistogramCounts

FIRST_TOKEN_BUCKETS_S = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
INTER_TOKEN_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip


@dataclass(frozen=True)
class ReplicaCounts:
    """What a replica has counted since it started.

    num_requests: that arrived. drafted_by_position, accepted_by_position: draft tokens by their
    position in the draft, the first one first. first_token_s, inter_token_s: as in docs/metrics.md.
    """

    num_requests: int = 0
    num_generated_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    drafted_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()
    first_token_s: HistogramCounts = field(
        default_factory=lambda: HistogramCounts.empty(FIRST_TOKEN_BUCKETS_S)
    )
    inter_token_s: HistogramCounts = field(
        default_factory=lambda: HistogramCounts.empty(INTER_TOKEN_BUCKETS_S)
    )

    def since(self, before: ReplicaCounts) -> ReplicaCounts:
        """What was counted after `before`."""
        return self._with(before, -1)

    def plus(self, other: ReplicaCounts) -> ReplicaCounts:
        """What two replicas counted together."""
        return self._with(other, 1)

    def _with(self, other: ReplicaCounts, sign: int) -> ReplicaCounts:
        def positions(name: str) -> tuple[int, ...]:
            pairs = zip_longest(getattr(self, name), getattr(other, name), fillvalue=0)
            return tuple(mine + sign * theirs for mine, theirs in pairs)

        def histogram(name: str) -> HistogramCounts:
            mine, theirs = getattr(self, name), getattr(other, name)
            joined: HistogramCounts = mine + theirs if sign > 0 else mine - theirs
            return joined

        return ReplicaCounts(
            num_requests=self.num_requests + sign * other.num_requests,
            num_generated_tokens=self.num_generated_tokens + sign * other.num_generated_tokens,
            num_drafts=self.num_drafts + sign * other.num_drafts,
            num_draft_tokens=self.num_draft_tokens + sign * other.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens + sign * other.num_accepted_tokens,
            drafted_by_position=positions("drafted_by_position"),
            accepted_by_position=positions("accepted_by_position"),
            first_token_s=histogram("first_token_s"),
            inter_token_s=histogram("inter_token_s"),
        )


def counted_between(
    before: Mapping[str, ReplicaCounts], after: Mapping[str, ReplicaCounts]
) -> ReplicaCounts:
    """What the replicas of `after` counted meanwhile, by replica id; one not in `before` is new.

    A replica that has gone takes nothing off what the others counted.
    """
    total = ReplicaCounts()
    for replica_id, counts in after.items():
        total = total.plus(counts.since(before.get(replica_id, ReplicaCounts())))
    return total


@dataclass(frozen=True)
class Percentiles:
    """Of a latency, in seconds."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, histogram: HistogramCounts) -> Percentiles | None:
        """None where nothing was observed."""
        found = [histogram.quantile(share) for share in (0.5, 0.95, 0.99)]
        known = [each for each in found if each is not None]
        return cls(*known) if len(known) == len(found) else None


@dataclass(frozen=True)
class Load:
    """How busy a replica is. num_draft_tokens: that a sequence may draft in the present step.

    estimated_speedup: over no speculation, at the present batch; None where it is not known.
    """

    num_running: int = 0
    num_decoding: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_draft_tokens: int = 0
    estimated_speedup: float | None = None


@dataclass(frozen=True)
class Figures:
    """One point of every chart; rates and percentiles are of the seconds before time_s.

    time_s: since 1970. What nothing is known of is None, such as the acceptance of no drafts.
    """

    time_s: float
    num_replicas: int
    num_running: int
    num_decoding: int
    num_waiting: int
    kv_cache_usage: float
    requests_per_s: float
    tokens_per_s: float
    first_token_s: Percentiles | None
    inter_token_s: Percentiles | None
    num_draft_tokens: float
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    acceptance_by_position: tuple[float, ...]
    estimated_speedup: float | None


def figures_of(
    time_s: float,
    loads: Sequence[Load],
    recent: ReplicaCounts,
    seconds: float,
    last_minute: ReplicaCounts,
) -> Figures:
    """The point at `time_s`. recent: counted in the `seconds` before, above 0.

    last_minute: what acceptance by position is told of, as late positions are reached seldom.
    """
    drafts, drafted = recent.num_drafts, recent.num_draft_tokens
    accepted = recent.num_accepted_tokens
    return Figures(
        time_s=time_s,
        num_replicas=len(loads),
        num_running=sum(load.num_running for load in loads),
        num_decoding=sum(load.num_decoding for load in loads),
        num_waiting=sum(load.num_waiting for load in loads),
        kv_cache_usage=_mean(load.kv_cache_usage for load in loads) or 0.0,
        requests_per_s=recent.num_requests / seconds,
        tokens_per_s=recent.num_generated_tokens / seconds,
        first_token_s=Percentiles.of(recent.first_token_s),
        inter_token_s=Percentiles.of(recent.inter_token_s),
        num_draft_tokens=_mean(load.num_draft_tokens for load in loads) or 0.0,
        acceptance_rate=accepted / drafted if drafted else None,
        mean_acceptance_length=1 + accepted / drafts if drafts else None,
        acceptance_by_position=_rates(last_minute),
        estimated_speedup=_speedup(loads),
    )


def _rates(counts: ReplicaCounts) -> tuple[float, ...]:
    """Accepted of drafted at each position that was drafted at all."""
    accepted = zip_longest(counts.drafted_by_position, counts.accepted_by_position, fillvalue=0)
    return tuple(hits / tries for tries, hits in accepted if tries)


def _speedup(loads: Iterable[Load]) -> float | None:
    """Of the replicas that know theirs, each by the requests that it decodes."""
    known = [
        (load.num_decoding, load.estimated_speedup)
        for load in loads
        if load.estimated_speedup is not None and load.num_decoding
    ]
    weight = sum(num_decoding for num_decoding, _ in known)
    return sum(count * speedup for count, speedup in known) / weight if weight else None


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return sum(listed) / len(listed) if listed else None
