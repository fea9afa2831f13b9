"""Counts the replicas that a pool needs for its objective, from the reports of its endpoints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable

from cluster.api.endpoint_picker.pool import Pool
from cluster.config.objective import Objective
from cluster.control.replica_scaler import PERIOD_S, ReplicaScaler, Totals

logger = logging.getLogger(__name__)


class PoolScaler:
    """The number of replicas that a pool needs: `number`, None while it is unknown."""

    def __init__(self, pool: Pool, objective: Objective) -> None:
        self.number: int | None = None
        self._pool = pool
        self._scaler = ReplicaScaler(objective, pool.clock())
        self._lacks_curves = False

    async def run(self) -> None:
        """Count until cancelled."""
        while True:
            if self._pool.is_synced:
                self.count()
            await asyncio.sleep(PERIOD_S)

    def count(self) -> None:
        """Set the number. Endpoints that are too busy for scrapes have their last reports."""
        now_s = self._pool.clock()
        counted = [each for each in self._pool.endpoints if each.may_be_up]
        reports = {each: each.last_report for each in counted if each.last_report is not None}
        curves = [each.curve for each in reports.values() if each.curve is not None]
        self._check(lacks_curves=bool(reports) and not curves)
        totals: dict[Hashable, Totals] = {
            endpoint: each.totals for endpoint, each in reports.items() if each.totals is not None
        }
        is_old = any((each.report_age_s(now_s) or 0.0) > 2 * PERIOD_S for each in reports)
        self.number = self._scaler.needed(
            now_s,
            totals,
            sum(each.num_requests for each in reports.values()),
            curves,
            num_refused=self._pool.refusals[429],
            num_starting=len(self._pool.endpoints) - len(reports),
            is_stale=is_old or len(totals) < len(reports),
        )

    def _check(self, *, lacks_curves: bool) -> None:
        """Log once that the number is unknown as long as no endpoint has a curve."""
        if lacks_curves and not self._lacks_curves:
            logger.warning("no endpoint reports expected tokens per second, which --slo needs")
        self._lacks_curves = lacks_curves
