"""Rates and charts of the fleet, from the counters that replicas report."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specdec.engine.metrics.metrics import FIRST_TOKEN, INTER_TOKEN
from specdec.types.reports.fleet import FleetStatistics, ReplicaReport
from specdec.types.reports.stats import Counts, HistogramCounts

WINDOW_S = 10.0
"""Window of the request rate, and of speculation and latency, in seconds."""

KEPT_S = 900.0
_PERIOD_S = 0.9
"""Less than a second, because a caller with that period is sometimes early."""

_SHORT_SILENCE_S = 3.0, 30.0
"""A replica that was not idle is late from the first on. After the second one it may be lost."""

_EDGE_WINDOW_S = 3.0
"""Window of the rates in charts; shorter where traffic has begun or ended, which is no slope."""

_LAST_MINUTE_S = 60.0

_REJECTED = "RESOURCE_EXHAUSTED"
_SERVER_ERRORS = frozenset({"INTERNAL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "UNKNOWN", "DATA_LOSS"})
_NOT_CLIENTS = _SERVER_ERRORS | {_REJECTED, "CANCELLED"}


class RequestRate:
    """Requests per second over the last ten seconds and all replicas.

    Requests arrived evenly since the report before the one that has them. From the first report on,
    the window grows from three to ten seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_at_s: float | None = None
        self._last: dict[str, tuple[float, int]] = {}  # time and counter by replica
        self._busy: dict[str, float] = {}  # time of the last report, if it is followed by another
        self._received: deque[tuple[float, float, int]] = deque()  # begin, end and number

    @property
    def is_known(self) -> bool:
        """Return whether no replica is late."""
        (least, most), now_s = _SHORT_SILENCE_S, self._clock()
        return not any(least < now_s - at_s <= most for at_s in self._busy.values())

    def report(self, replica_id: str, num_requests: int, *, is_busy: bool = False) -> None:
        """Record a replica's counter of requests since it started. is_busy: whether it has any.

        Requests before its first report may be old, and do not count. A replica that has or had
        requests since its last report sends the next one within a second.
        """
        now_s = self._clock()
        if self._began_at_s is None:
            self._began_at_s = now_s
        begin_s, before = self._last.get(replica_id, (now_s, num_requests))
        self._last[replica_id] = now_s, num_requests
        self._busy.pop(replica_id, None)
        if is_busy or num_requests > before:
            self._busy[replica_id] = now_s
        if num_requests > before:
            self._received.append((begin_s, now_s, num_requests - before))

    def forget(self, replica_id: str) -> None:
        """Forget the counter of a replica that has ended; its requests stay counted."""
        self._last.pop(replica_id, None)
        self._busy.pop(replica_id, None)

    def per_s(self) -> float:
        """Return the requests per second."""
        if self._began_at_s is None:
            return 0.0
        now_s = self._clock()
        window_s = min(max(now_s - self._began_at_s, _EDGE_WINDOW_S), WINDOW_S)
        while self._received and self._received[0][1] <= now_s - WINDOW_S:
            self._received.popleft()
        return sum(_share_after(now_s - window_s, *each) for each in self._received) / window_s


def _share_after(time_s: float, begin_s: float, end_s: float, number: int) -> float:
    """Return the part after a time of a number that is spread over an interval."""
    return number if begin_s >= time_s else number * (end_s - time_s) / (end_s - begin_s)


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
class FleetMemory:
    """Memory of all replicas: see MemoryUse. node_usage: of the fullest node, from 0 to 1."""

    process_bytes: int
    node_usage: float
    gpu_bytes: int
    gpu_used_bytes: int

    @classmethod
    def of(cls, reports: Iterable[ReplicaReport]) -> FleetMemory | None:
        """Return the sums over replicas; None where no replica has read its memory."""
        known = [report.memory for report in reports if report.memory is not None]
        if not known:
            return None
        return cls(
            process_bytes=sum(each.process_bytes for each in known),
            node_usage=max(each.node_used_bytes / each.node_bytes for each in known),
            gpu_bytes=sum(each.gpu_bytes for each in known),
            gpu_used_bytes=sum(each.gpu_used_bytes for each in known),
        )


@dataclass(frozen=True)
class Figures:
    """One point of every chart. Unknown values are None, such as the acceptance without drafts.

    time_s: since 1970. Rates, percentiles, steps and drafts are of the ten seconds before it,
    arrivals_per_s and generated_per_s of three, or since the fleet was idle. speedup: over no
    drafts, by the cost of steps. reached_by_position, accepted_by_position: see Counts; of the last
    minute, because late positions are rare. num_errors, num_rejected, num_client_errors: calls that
    failed in the last minute, with a status of 5xx, 429 and another one. num_restarts: of models,
    and lost replicas, since the control plane started. memory: None before a report has it.
    """

    time_s: float
    num_running: int
    num_decoding: int
    num_waiting: int
    kv_cache_usage: float
    requests_per_s: float
    tokens_per_s: float
    arrivals_per_s: float
    generated_per_s: float
    first_token_s: Percentiles | None
    inter_token_s: Percentiles | None
    num_steps: int
    num_drafted_steps: int
    speedup: float | None
    mean_draft_length: float | None
    mean_acceptance_length: float | None
    acceptance_rate: float | None
    reached_by_position: tuple[int, ...]
    accepted_by_position: tuple[int, ...]
    num_errors: int
    num_rejected: int
    num_client_errors: int
    num_restarts: int
    memory: FleetMemory | None


@dataclass(frozen=True)
class _Snapshot:
    """Totals of the fleet at one time.

    counts: since the history began. is_idle: whether no replica has a request.
    """

    time_s: float
    counts: Counts
    is_idle: bool


class _Counted(NamedTuple):
    """Counts of the fleet over a number of seconds above 0."""

    counts: Counts
    seconds: float

    @classmethod
    def between(cls, begin: _Snapshot, end: _Snapshot) -> _Counted:
        """Return what was counted between two snapshots."""
        return cls(end.counts.minus(begin.counts), end.time_s - begin.time_s)


class FleetHistory:
    """The last 15 minutes of the fleet, at most one point per second, by replicas' counters.

    Counters of a replica are used from its second report on, so replicas that join, leave or return
    cause no jump. A window reaches back to the previous point where that is older: an idle fleet
    has few points.
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
        reports = [each.report for each in now.status.replicas]
        is_idle = not any(each.num_running or each.num_waiting for each in reports)
        self._snapshots.append(_Snapshot(time_s, total, is_idle))
        if len(self._snapshots) > 1:
            self._points.append(self._point(now))
        # One snapshot from before the longest window is kept.
        while len(self._snapshots) > 2 and self._snapshots[1].time_s <= time_s - _LAST_MINUTE_S:
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
        recent, minute = (
            self._before(last.time_s - seconds) for seconds in (WINDOW_S, _LAST_MINUTE_S)
        )
        begins = (self._edge(), recent, minute)
        return _figures(now, *(_Counted.between(begin, last) for begin in begins))

    def _edge(self) -> _Snapshot:
        """Return the snapshot three seconds ago, or a later one at which traffic began or ended.

        An idle fleet has few snapshots: one long before its traffic is none from which it counts.
        """
        *earlier, last = self._snapshots
        begin_s = last.time_s - _EDGE_WINDOW_S
        later = [each for each in earlier if each.time_s > begin_s]
        if last.is_idle:
            return earlier[-1]
        if idle := [each for each in later if each.is_idle]:
            return idle[-1]
        before = self._before(begin_s)
        is_old = before.is_idle and before.time_s < begin_s - 1.0
        return later[0] if is_old and later else before

    def _before(self, time_s: float) -> _Snapshot:
        """Return the latest snapshot up to a time; the oldest if all are later."""
        *earlier, _ = self._snapshots
        old = [each for each in earlier if each.time_s <= time_s]
        return old[-1] if old else earlier[0]


def _figures(now: FleetStatistics, edge: _Counted, recent: _Counted, minute: _Counted) -> Figures:
    """Return the point of `now`, of three windows before it."""
    reports = [each.report for each in now.status.replicas]
    totals, drafted, counts = now.totals, recent.counts.speculation, recent.counts
    return Figures(
        time_s=now.at.timestamp(),
        num_running=sum(report.num_running for report in reports),
        num_decoding=sum(report.num_decoding for report in reports),
        num_waiting=sum(report.num_waiting for report in reports),
        kv_cache_usage=_mean([report.kv_cache_usage for report in reports]),
        requests_per_s=now.requests_per_s,
        tokens_per_s=counts.num_generated_tokens / recent.seconds,
        arrivals_per_s=edge.counts.num_requests / edge.seconds,
        generated_per_s=edge.counts.num_generated_tokens / edge.seconds,
        first_token_s=Percentiles.of(counts.histograms.get(FIRST_TOKEN)),
        inter_token_s=Percentiles.of(counts.histograms.get(INTER_TOKEN)),
        num_steps=counts.num_steps,
        num_drafted_steps=counts.num_drafted_steps,
        speedup=counts.undrafted_s / counts.spent_s if counts.spent_s else None,
        mean_draft_length=drafted.num_draft_tokens / drafted.num_drafts
        if drafted.num_drafts
        else None,
        mean_acceptance_length=drafted.mean_acceptance_length if drafted.num_drafts else None,
        acceptance_rate=drafted.acceptance_rate if drafted.num_drafts else None,
        reached_by_position=minute.counts.reached_by_position,
        accepted_by_position=minute.counts.accepted_by_position,
        num_errors=_num_failed(minute.counts, _SERVER_ERRORS),
        num_rejected=_num_failed(minute.counts, {_REJECTED}),
        num_client_errors=_num_failed(minute.counts, minute.counts.failed.keys() - _NOT_CLIENTS),
        num_restarts=totals.num_target_restarts
        + totals.num_draft_restarts
        + now.status.num_lost_replicas,
        memory=FleetMemory.of(reports),
    )


def _num_failed(counts: Counts, codes: Collection[str]) -> int:
    """Return the calls that failed with one of these gRPC status codes."""
    return sum(counts.failed.get(code, 0) for code in codes)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
