"""The last quarter of an hour of the fleet, a point a second at most."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.fleet_figures import Figures, Load, ReplicaCounts, counted_between, figures_of

KEPT_S = 900.0
_PERIOD_S = 0.9
"""Who asks each second is a little early at times."""

_RATE_WINDOW_S = 10.0
_POSITION_WINDOW_S = 60.0


@dataclass(frozen=True)
class _Snapshot:
    time_s: float
    counts: Mapping[str, ReplicaCounts]


class FleetHistory:
    """Turns what replicas have counted, told from time to time, into points of charts.

    Rates go by the last ten seconds, or by the time since the point before where that is longer:
    at rest points are far apart.
    """

    def __init__(self) -> None:
        self._snapshots: deque[_Snapshot] = deque()
        self._figures: deque[Figures] = deque()

    def add(
        self, time_s: float, loads: Mapping[str, Load], counts: Mapping[str, ReplicaCounts]
    ) -> None:
        """Takes in how the replicas are, by replica id. Too soon after the last time it is ignored.

        time_s: seconds since 1970. A clock that was set back begins the history anew.
        """
        if self._snapshots and time_s < self._snapshots[-1].time_s:
            self._snapshots.clear()
            self._figures.clear()
        if self._snapshots and time_s - self._snapshots[-1].time_s < _PERIOD_S:
            return
        self._snapshots.append(_Snapshot(time_s, dict(counts)))
        if len(self._snapshots) > 1:
            self._figures.append(self._point(time_s, loads))
        self._forget(time_s)

    def since(self, time_s: float) -> tuple[Figures, ...]:
        """The points after `time_s`, the oldest first."""
        return tuple(point for point in self._figures if point.time_s > time_s)

    def _point(self, time_s: float, loads: Mapping[str, Load]) -> Figures:
        begin = self._snapshot_before(time_s - _RATE_WINDOW_S)
        recent = counted_between(begin.counts, self._snapshots[-1].counts)
        first = self._snapshot_before(time_s - _POSITION_WINDOW_S)
        last_minute = counted_between(first.counts, self._snapshots[-1].counts)
        seconds = time_s - begin.time_s
        return figures_of(time_s, list(loads.values()), recent, seconds, last_minute)

    def _snapshot_before(self, time_s: float) -> _Snapshot:
        """The latest that is so old; of younger ones the oldest."""
        old = [each for each in self._snapshots if each.time_s <= time_s]
        return old[-1] if old else self._snapshots[0]

    def _forget(self, time_s: float) -> None:
        """Keeps one snapshot from before the longer window, for points to begin at."""
        while len(self._snapshots) > 2 and self._snapshots[1].time_s <= time_s - _POSITION_WINDOW_S:
            self._snapshots.popleft()
        while self._figures and self._figures[0].time_s < time_s - KEPT_S:
            self._figures.popleft()
