"""Counts the replicas that a pool needs for its objective, from the reports of its endpoints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable, Mapping

from cluster.api.endpoint_picker.endpoint import Endpoint
from cluster.api.endpoint_picker.pool import Pool
from cluster.api.endpoint_picker.reports import EndpointReport
from cluster.config.objective import Objective
from cluster.control.replica_scaler import PERIOD_S, WINDOW_S, ReplicaScaler, Totals
from specdec.types.reports.service_curve import ServiceCurve

logger = logging.getLogger(__name__)


class PoolScaler:
    """The number of replicas that a pool needs: `number`, None while it is unknown.

    unread: addresses of endpoints that run without recent reports, or report no arrivals. Each
    counts as one full replica: it may serve as much, and takes the place of one that can.
    """

    def __init__(self, pool: Pool, objective: Objective) -> None:
        self.number: int | None = None
        self.unread: frozenset[str] = frozenset()
        self._pool = pool
        self._scaler = ReplicaScaler(objective, pool.clock())
        self._logged: frozenset[str] = frozenset()  # addresses of unread endpoints
        self._is_lacking = False

    async def run(self) -> None:
        """Count until cancelled."""
        while True:
            if self._pool.is_synced:
                self.count()
            await asyncio.sleep(PERIOD_S)

    def count(self) -> None:
        """Set the number. Endpoints too busy for scrapes have their last reports for WINDOW_S."""
        now_s = self._pool.clock()
        reports, totals = dict[Endpoint, EndpointReport](), dict[Hashable, Totals]()
        unread, has_reports, curves = dict[str, str](), False, list[ServiceCurve]()
        for each in self._pool.endpoints:
            report, age_s = each.last_report, each.report_age_s(now_s)
            if not each.may_be_up or report is None or age_s is None:
                continue
            if age_s > WINDOW_S:
                unread[each.address] = f"has not reported for {WINDOW_S:g} s"
                continue
            has_reports = True
            if report.totals is None:
                unread[each.address] = "reports no arrivals"
                continue
            reports[each], totals[each] = report, report.totals
            if report.curve is not None:
                curves.append(report.curve)
        self.unread = frozenset(unread)
        self._log(unread if reports else {}, is_lacking=bool(has_reports or unread) and not curves)
        is_old = any((each.report_age_s(now_s) or 0.0) > 2 * PERIOD_S for each in reports)
        self.number = self._scaler.needed(
            now_s,
            totals,
            sum(each.num_requests for each in reports.values()),
            curves,
            num_refused=self._pool.refusals[429],
            num_full=len(unread),
            num_starting=len(self._pool.endpoints) - len(reports) - len(unread),
            is_stale=is_old,
        )

    def _log(self, unread: Mapping[str, str], *, is_lacking: bool) -> None:
        """Log once what counts as full, by address, and that the number is unknown so far."""
        for address in sorted(unread.keys() - self._logged):
            logger.warning("%s %s: it counts as a full replica", address, unread[address])
        self._logged = frozenset(unread)
        if is_lacking and not self._is_lacking:
            text = "no endpoint reports arrivals and expected tokens per second, which --slo needs"
            logger.warning(text)
        self._is_lacking = is_lacking
