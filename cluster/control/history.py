"""The last 15 minutes of the fleet, at most one point per second."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.control.timeseries import Figures, figures_of
from specdec.types.fleet import FleetStatistics
from specdec.types.stats import Counts

KEPT_S = 900.0
_PERIOD_S = 0.9
"""Less than a second, because a caller with that period is sometimes early."""

_RATE_WINDOW_S = 10.0
_POSITION_WINDOW_S = 60.0


@dataclass(frozen=True)
class _Snapshot:
    """Totals of the fleet at one time. counts: since the history began."""

    time_s: float
    counts: Counts


class FleetHistory:
    """Turns the counters of replicas' reports into points of charts.

    Counters of a replica are used from its second report on, so replicas that join, leave or return
    cause no jump. Rates are over the last ten seconds, or over the time since the previous point
    where that is longer: an idle fleet has few points.
    """

    def __init__(self) -> None:
        self._counted: Mapping[str, Counts] = {}
        self._snapshots: deque[_Snapshot] = deque()
        self._figures: deque[Figures] = deque()

    def is_due(self, time_s: float) -> bool:
        """Return whether another point may be added. time_s: seconds since 1970."""
        return not self._snapshots or not 0 <= time_s - self._snapshots[-1].time_s < _PERIOD_S

    def add(self, now: FleetStatistics) -> None:
        """Add the present state of the fleet. A clock that was set back restarts the history."""
        time_s = now.at.timestamp()
        if self._snapshots and time_s <= self._snapshots[-1].time_s:
            self._snapshots.clear()
            self._figures.clear()
        total = self._count(now)
        self._snapshots.append(_Snapshot(time_s, total))
        if len(self._snapshots) > 1:
            self._figures.append(self._point(now))
        self._forget(time_s)

    def since(self, time_s: float) -> tuple[Figures, ...]:
        """Return the points after `time_s`, oldest first."""
        return tuple(point for point in self._figures if point.time_s > time_s)

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
        begin = self._snapshot_before(last.time_s - _RATE_WINDOW_S)
        minute_ago = self._snapshot_before(last.time_s - _POSITION_WINDOW_S)
        return figures_of(
            now,
            recent=last.counts.minus(begin.counts),
            seconds=last.time_s - begin.time_s,
            last_minute=last.counts.minus(minute_ago.counts),
        )

    def _snapshot_before(self, time_s: float) -> _Snapshot:
        """Return the latest snapshot up to a time; the oldest if all are later."""
        old = [each for each in self._snapshots if each.time_s <= time_s]
        return old[-1] if old else self._snapshots[0]

    def _forget(self, time_s: float) -> None:
        """Drop old points and snapshots; keep one snapshot from before the longest window."""
        while len(self._snapshots) > 2 and self._snapshots[1].time_s <= time_s - _POSITION_WINDOW_S:
            self._snapshots.popleft()
        while self._figures and self._figures[0].time_s < time_s - KEPT_S:
            self._figures.popleft()
