"""Data points of the charts of the fleet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from specdec.engine.metrics import FIRST_TOKEN, INTER_TOKEN
from specdec.types.fleet import FleetStatistics, ReplicaReport
from specdec.types.stats import Counts, HistogramCounts


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of a latency, in seconds."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, histogram: HistogramCounts | None) -> Percentiles | None:
        """Return the percentiles; None without observations."""
        if histogram is None:
            return None
        p50, p95, p99 = (histogram.quantile(share) for share in (0.5, 0.95, 0.99))
        if p50 is None or p95 is None or p99 is None:
            return None
        return cls(p50, p95, p99)


@dataclass(frozen=True)
class Figures:
    """One point of every chart. Unknown values are None, such as the acceptance without drafts.

    time_s: since 1970. Rates, percentiles and acceptance are of the seconds before it.
    num_chosen_tokens: mean over the replicas. acceptance_by_position: of the last minute, because
    late positions are rare. estimated_speedup: over no drafts, by the cost of steps.
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
    num_chosen_tokens: float
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    acceptance_by_position: tuple[float, ...]
    estimated_speedup: float | None


def figures_of(
    now: FleetStatistics, recent: Counts, seconds: float, last_minute: Counts
) -> Figures:
    """Return the point of `now`. recent: counted in the `seconds` before it, more than 0."""
    reports = [each.report for each in now.status.replicas]
    drafted = recent.speculation
    return Figures(
        time_s=now.at.timestamp(),
        num_replicas=len(reports),
        num_running=sum(report.num_running for report in reports),
        num_decoding=sum(report.num_decoding for report in reports),
        num_waiting=sum(report.num_waiting for report in reports),
        kv_cache_usage=_mean([report.kv_cache_usage for report in reports]),
        requests_per_s=now.requests_per_s,
        tokens_per_s=recent.num_generated_tokens / seconds,
        first_token_s=Percentiles.of(recent.histograms.get(FIRST_TOKEN)),
        inter_token_s=Percentiles.of(recent.histograms.get(INTER_TOKEN)),
        num_chosen_tokens=_mean([report.num_chosen_tokens for report in reports]),
        acceptance_rate=drafted.acceptance_rate if drafted.num_drafts else None,
        mean_acceptance_length=drafted.mean_acceptance_length if drafted.num_drafts else None,
        acceptance_by_position=_by_position(last_minute),
        estimated_speedup=_speedup(reports),
    )


def _by_position(counts: Counts) -> tuple[float, ...]:
    """Return the acceptance rate at each position that was drafted."""
    pairs = zip_longest(counts.drafted_by_position, counts.accepted_by_position, fillvalue=0)
    return tuple(accepted / drafted for drafted, accepted in pairs if drafted)


def _speedup(reports: Iterable[ReplicaReport]) -> float | None:
    """Return the mean over replicas with an estimate, weighted by their decoding requests."""
    known = [
        (report.num_decoding, report.estimated_speedup)
        for report in reports
        if report.estimated_speedup is not None and report.num_decoding
    ]
    weight = sum(num_decoding for num_decoding, _ in known)
    return sum(count * speedup for count, speedup in known) / weight if weight else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
