"""Rates and charts of the fleet, from the counters that replicas report."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from specdec.engine.metrics.metrics import FIRST_TOKEN, INTER_TOKEN
from specdec.types.reports.fleet import FleetStatistics, ReplicaReport
from specdec.types.reports.stats import Counts, HistogramCounts

WINDOW_S = 10.0
"""Of the request rate, and of the rates in charts."""

KEPT_S = 900.0
_PERIOD_S = 0.9
"""Less than a second, because a caller with that period is sometimes early."""

_POSITION_WINDOW_S = 60.0


class RequestRate:
    """Requests per second over the last ten seconds and all replicas."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: dict[str, int] = {}  # counter by replica
        self._received: deque[tuple[float, int]] = deque()

    def report(self, replica_id: str, num_requests: int) -> None:
        """Record a replica's counter of requests since it started.

        Requests before its first report may be old, and do not count.
        """
        new = num_requests - self._last.get(replica_id, num_requests)
        self._last[replica_id] = num_requests
        if new > 0:
            self._received.append((self._clock(), new))

    def forget(self, replica_id: str) -> None:
        """Forget the counter of a replica that has ended; its requests stay counted."""
        self._last.pop(replica_id, None)

    def per_s(self) -> float:
        """Return the requests per second."""
        begin_s = self._clock() - WINDOW_S
        while self._received and self._received[0][0] <= begin_s:
            self._received.popleft()
        return sum(count for _, count in self._received) / WINDOW_S


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


@dataclass(frozen=True)
class _Snapshot:
    """Totals of the fleet at one time. counts: since the history began."""

    time_s: float
    counts: Counts


class FleetHistory:
    """The last 15 minutes of the fleet, at most one point per second, by replicas' counters.

    Counters of a replica are used from its second report on, so replicas that join, leave or return
    cause no jump. Rates are over the last ten seconds, or over the time since the previous point
    where that is longer: an idle fleet has few points.
    """

    def __init__(self) -> None:
        self._counted: Mapping[str, Counts] = {}
        self._snapshots: deque[_Snapshot] = deque()
        self._points: deque[Figures] = deque()

    def is_due(self, time_s: float) -> bool:
        """Return whether another point may be added. time_s: seconds since 1970."""
        return not self._snapshots or not 0 <= time_s - self._snapshots[-1].time_s < _PERIOD_S

    def add(self, now: FleetStatistics) -> None:
        """Add the present state of the fleet. A clock that was set back restarts the history."""
        time_s = now.at.timestamp()
        if self._snapshots and time_s <= self._snapshots[-1].time_s:
            self._snapshots.clear()
            self._points.clear()
        total = self._count(now)
        self._snapshots.append(_Snapshot(time_s, total))
        if len(self._snapshots) > 1:
            self._points.append(self._point(now))
        # One snapshot from before the longest window is kept.
        while len(self._snapshots) > 2 and self._snapshots[1].time_s <= time_s - _POSITION_WINDOW_S:
            self._snapshots.popleft()
        while self._points and self._points[0].time_s < time_s - KEPT_S:
            self._points.popleft()

    def since(self, time_s: float) -> tuple[Figures, ...]:
        """Return the points after `time_s`, oldest first."""
        return tuple(point for point in self._points if point.time_s > time_s)

    def _count(self, now: FleetStatistics) -> Counts:
        """Return the last total plus what each replica has counted since."""
        before = self._counted
        self._counted = {each.report.replica_id: each.report.counts for each in now.status.replicas}
        total = self._snapshots[-1].counts if self._snapshots else Counts()
        new = (
            counts.minus(before[replica_id])
            for replica_id, counts in self._counted.items()
            if replica_id in before
        )
        return total.plus(Counts.sum(new))

    def _point(self, now: FleetStatistics) -> Figures:
        last = self._snapshots[-1]
        begin = self._snapshot_before(last.time_s - WINDOW_S)
        minute_ago = self._snapshot_before(last.time_s - _POSITION_WINDOW_S)
        return _figures(
            now,
            recent=last.counts.minus(begin.counts),
            seconds=last.time_s - begin.time_s,
            last_minute=last.counts.minus(minute_ago.counts),
        )

    def _snapshot_before(self, time_s: float) -> _Snapshot:
        """Return the latest snapshot up to a time; the oldest if all are later."""
        old = [each for each in self._snapshots if each.time_s <= time_s]
        return old[-1] if old else self._snapshots[0]


def _figures(now: FleetStatistics, recent: Counts, seconds: float, last_minute: Counts) -> Figures:
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
