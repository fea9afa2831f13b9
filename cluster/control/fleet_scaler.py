"""Counts the replicas that a service needs for its objective, from the reports of its Routers."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.config.objective import Objective
from cluster.control.replica_scaler import ReplicaScaler, Totals
from specdec.types.reports.fleet import DRAINING, LOADING, ReplicaReport


class FleetScaler:
    """The number of replicas that a service needs: `number`, None while it is unknown."""

    def __init__(self, objective: Objective, now_s: float) -> None:
        self.number: int | None = None
        self._scaler = ReplicaScaler(objective, now_s)

    def count(self, now_s: float, reports: Iterable[ReplicaReport], *, is_stale: bool) -> None:
        """Set the number. is_stale: a report is overdue, so that load may be missing.

        It is cheap to call for each report: most calls come before a count is due.
        """
        if not self._scaler.is_due(now_s):
            return
        staying = [each for each in reports if each.reason != DRAINING]
        running = [each for each in staying if each.reason != LOADING]
        self.number = self._scaler.needed(
            now_s,
            {each.replica_id: Totals.of(each.counts) for each in running},
            sum(each.num_running + each.num_waiting for each in running),
            [each.service_curve for each in running if each.service_curve is not None],
            num_starting=len(staying) - len(running),
            is_stale=is_stale,
        )
