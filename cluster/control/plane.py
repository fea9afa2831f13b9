"""The ControlPlane: the operators' settings of a service, and the state of its replicas.

It is not involved in requests. While it is unavailable, Routers keep the last settings.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Any

from cluster.config.objective import Objective
from cluster.control.fleet_scaler import FleetScaler
from cluster.control.overrides import OverrideLimits, after_change, plain_change, state_of
from cluster.control.peers import ServiceCard
from cluster.control.store import ControlStore, StoredSpeculation, state_dir
from cluster.control.timeseries import Figures, FleetHistory, RequestRate
from specdec.types.control import (
    DEFAULT_AUDIT_PAGE,
    MAX_AUDIT_PAGE,
    AuditPage,
    SpeculationChange,
    SpeculationControl,
    SpeculationPreview,
    SpeculationState,
    StateStamp,
    active_rule,
)
from specdec.types.errors import InvalidValueError, SpecdecError, StorageError, VersionConflictError
from specdec.types.reports.fleet import (
    FleetStatistics,
    ReplicaReport,
    ReplicaStatus,
    ServiceStatus,
)
from specdec.types.reports.stats import Counts

logger = logging.getLogger(__name__)

SILENCE_LIMIT_S = 90.0
"""A replica without a report for this long counts as lost; a step may take long."""

OVERDUE_S = 36.0
"""A replica whose report is older than this is not ready.

An idle replica reports every 30 s; a call may time out, and is repeated a second later."""

EXPIRED = "expired"
"""The reason of the version that is made when the operators' settings expire."""

_TICK_S = 1.0
_MAX_REMEMBERED = 64
"""Replicas that have left or become silent, whose reports may still arrive."""


@dataclass(frozen=True)
class _Received:
    """A replica's last report with its uptime then, and when it arrived by this clock.

    started_at_s: when the replica started, by this clock and the report that was on its way for the
    shortest time. The order of replicas that started together changes only at such a report.
    """

    report: ReplicaReport
    uptime_s: float
    received_at_s: float
    started_at_s: float

    def status(self, now_s: float) -> ReplicaStatus:
        """Return the last report; not ready, whatever it contains, if the next one is overdue."""
        report, age_s = self.report, now_s - self.received_at_s
        if age_s > OVERDUE_S:
            report = replace(report, is_ready=False, reason=f"no report for {age_s:.0f} s")
        return ReplicaStatus(report, now_s - self.started_at_s, age_s)


class ControlPlane:
    """Stores the operators' settings, sends them to watching Routers, and collects reports.

    For one event loop. Its methods are coroutines because other processes call them.
    """

    def __init__(
        self,
        configured: SpeculationControl | None,
        store: ControlStore,
        *,
        limits: OverrideLimits | None = None,
        objective: Objective | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Read the stored settings.

        configured: settings without overrides; None: nothing can draft. limits: of what can be set.
        objective: for which replicas are counted. wall_clock: seconds since 1970, for what outlasts
        this process.
        """
        self._configured = configured
        self._store = store
        self._limits = limits or OverrideLimits()
        self._clock = clock
        self._wall_clock = wall_clock
        self._request_rate = RequestRate(clock)
        self._stored = store.read()
        self._unstored: StoredSpeculation | None = None  # an expiry
        self._state = state_of(self._stored, configured, self._limits, None)
        self._changed = asyncio.Event()
        self._reports: dict[str, _Received] = {}
        self._departed = Counts()
        self._left: deque[str] = deque(maxlen=_MAX_REMEMBERED)
        self._silent: dict[str, Counts] = {}  # parts of `_departed`, the earliest first
        self._history = FleetHistory()
        self._num_lost = 0
        self._scaler = None if objective is None else FleetScaler(objective, clock())
        self._ticking: asyncio.Task[None] | None = None
        self.tick()

    async def speculation(self) -> SpeculationState:
        """Return the settings in force."""
        self._follow_store()
        self.tick()
        return self._state

    async def set_speculation(self, change: SpeculationChange) -> SpeculationState:
        """Store a change, wake the watchers, and return the settings then in force.

        Raises VersionConflictError when the state is not of the expected version,
        InvalidValueError when the service has no speculation, or lacks the method or verifier, and
        StorageError when the change cannot be stored.
        """
        self._require_speculation(change)
        self.tick()
        self._store_expiry()
        self._follow(before := self._store.read())
        expected = change.expected_version
        if expected is not None and expected != before.version:
            raise VersionConflictError(expected, before.version)
        after = after_change(before, change, self._wall_clock())
        if not self._store.replace(after, plain_change(change)):
            raise VersionConflictError(before.version, self._store.read().version)
        self._adopt(after)
        return self._state

    async def preview(self, change: SpeculationChange | None) -> SpeculationPreview:
        """Return the effect of a change at the present load; None: of the settings in force.

        Raises InvalidValueError as set_speculation does.
        """
        after = self._stored
        if change is not None:
            self._require_speculation(change)
            after = after_change(after, change, self._wall_clock())
        rate, state = self._request_rate.per_s(), self._state_of(after)
        num_decoding = sum(each.report.num_decoding for each in self._reports.values())
        return SpeculationPreview(rate, num_decoding, state.in_force, state.active_rule)

    async def audit_log(self, page_size: int, page_token: str) -> AuditPage:
        """Return a page of changes, newest first. Raises InvalidValueError."""
        if not 0 <= page_size <= MAX_AUDIT_PAGE:
            raise InvalidValueError("page_size", page_size, f"from 1 to {MAX_AUDIT_PAGE}, or 0")
        if page_token and not (page_token.isdecimal() and len(page_token) < 19):
            raise InvalidValueError("page_token", page_token, "a next_page_token, or empty")
        count = page_size or DEFAULT_AUDIT_PAGE
        found = self._store.changes(int(page_token) if page_token else None, count + 1)
        next_token = str(found[count - 1].version) if len(found) > count else ""
        return AuditPage(tuple(found[:count]), next_token)

    async def watch(self, known: StateStamp | None, timeout_s: float) -> SpeculationState:
        """Return the state once its stamp differs from `known`, or after `timeout_s` seconds."""
        self._start_ticking()
        self._follow_store()
        if self._state.stamp == known:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
        return self._state

    async def report(self, report: ReplicaReport, uptime_s: float) -> int | None:
        """Store a replica's report, unless a later one has arrived, or the replica has left.

        Returns the number of replicas that the objective needs; None while it is unknown.
        Calls may overtake each other, and counters must never decrease. A replica that was silent
        may return: its report has what was counted when it was taken for lost.
        """
        before = self._reports.get(report.replica_id)
        is_outdated = before is not None and uptime_s < before.uptime_s
        if is_outdated or report.replica_id in self._left:
            return self._replicas_needed
        if (counted := self._silent.pop(report.replica_id, None)) is not None:
            self._departed = self._departed.minus(counted)
        now_s = self._clock()
        started_at_s = now_s - uptime_s
        if before is not None:
            started_at_s = min(started_at_s, before.started_at_s)
        self._reports[report.replica_id] = _Received(report, uptime_s, now_s, started_at_s)
        is_busy = report.num_running + report.num_waiting > 0
        self._request_rate.report(report.replica_id, report.counts.num_requests, is_busy=is_busy)
        self.tick()
        self._count_replicas()
        if self._history.is_due(self._wall_clock()):
            await self.fleet()
        return self._replicas_needed

    async def leave(self, replica_id: str, *, has_failed: bool) -> None:
        """Remove a replica that ends."""
        self._left.append(replica_id)
        if self._forget(replica_id):
            self._num_lost += has_failed

    async def status(self) -> ServiceStatus:
        """Return every replica with a recent report, and the settings in force."""
        now_s = self._clock()
        for replica_id, each in list(self._reports.items()):
            if now_s - each.received_at_s > SILENCE_LIMIT_S:
                self._forget(replica_id)
                self._remember(replica_id, each.report.counts)
                self._num_lost += 1
        self.tick()
        return ServiceStatus(
            replicas=tuple(
                each.status(now_s)
                for each in sorted(self._reports.values(), key=lambda each: each.started_at_s)
            ),
            speculation=self._state,
            num_lost_replicas=self._num_lost,
        )

    async def fleet(self) -> FleetStatistics:
        """Return all replicas at this moment, and their totals."""
        status = await self.status()
        fleet = FleetStatistics(
            datetime.fromtimestamp(self._wall_clock(), UTC),
            status,
            self._request_rate.per_s(),
            Counts.sum((self._departed, *(each.report.counts for each in status.replicas))),
            self._replicas_needed,
        )
        if self._history.is_due(fleet.at.timestamp()):
            self._history.add(fleet)
        return fleet

    async def history(self, after_s: float) -> tuple[Figures, ...]:
        """Return the points of the charts after a time, in seconds since 1970; oldest first."""
        return self._history.since(after_s)

    def tick(self) -> None:
        """Expire settings, and select the rule for the present request rate.

        Call it every second while there is either; every call from outside does it too.
        """
        expires_at_s = self._stored.expires_at_s
        if expires_at_s is not None and self._wall_clock() >= expires_at_s:
            self._expire(expires_at_s)
        state = self._state_of(self._stored)
        if state.active_rule != self._state.active_rule:
            self._announce(state)

    @property
    def _replicas_needed(self) -> int | None:
        return None if self._scaler is None else self._scaler.number

    def _count_replicas(self) -> None:
        if self._scaler is not None:
            now_s, received = self._clock(), self._reports.values()
            is_stale = any(now_s - each.received_at_s > OVERDUE_S for each in received)
            self._scaler.count(now_s, (each.report for each in received), is_stale=is_stale)

    def _require_speculation(self, change: SpeculationChange) -> None:
        if self._configured is None:
            limit = "one that drafts, for speculation to be changed; the service has none"
            raise InvalidValueError("speculative_config", "none", limit)
        self._limits.check(change)

    def _start_ticking(self) -> None:
        """Start ticking with the first watcher. At rest a tick only checks two fields."""
        if self._ticking is None or self._ticking.done():
            self._ticking = asyncio.get_running_loop().create_task(self._tick_indefinitely())

    async def _tick_indefinitely(self) -> None:
        while True:
            if self._state.rules or self._stored.expires_at_s is not None:
                self.tick()
                await asyncio.sleep(_TICK_S)
            else:
                await self._changed.wait()

    def _expire(self, expires_at_s: float) -> None:
        """Write a version without overrides, unless another process was first.

        The overrides end in any case; what cannot be stored now is stored before the next change.
        """
        after = StoredSpeculation(self._stored.version + 1, {}, expires_at_s, "", EXPIRED)
        self._unstored = after
        try:
            self._store_expiry()
            after = self._store.read()
        except StorageError as error:
            logger.warning("expired settings end, but are stored still: %s", error)
        self._adopt(after)

    def _store_expiry(self) -> None:
        if self._unstored is not None:
            self._store.replace(self._unstored, {"reset": True})
            self._unstored = None

    def _follow_store(self) -> None:
        """Put in force what another process has stored, as in an upgrade of the service."""
        with suppress(StorageError):  # reported where something is to be stored
            self._follow(self._store.read())

    def _follow(self, stored: StoredSpeculation) -> None:
        if stored.version >= self._stored.version:
            self._unstored = None  # another process was first
            if stored != self._stored:
                self._adopt(stored)

    def _adopt(self, stored: StoredSpeculation) -> None:
        self._stored = stored
        self._announce(self._state_of(stored))

    def _announce(self, state: SpeculationState) -> None:
        self._state = state
        self._changed.set()  # wakes present watchers; later ones compare the stamp
        self._changed = asyncio.Event()
        logger.info("speculation: %s", state.describe())

    def _state_of(self, stored: StoredSpeculation) -> SpeculationState:
        """Return the state with these settings at the present rate; an unknown one ends no rule."""
        rules = state_of(stored, self._configured, self._limits, None).rules
        before = self._state.active_rule if rules == self._state.rules else None
        active = active_rule(rules, self._request_rate.per_s(), before)
        if before is not None and not self._request_rate.is_known:
            active = before if active is None else max(active, before)
        return state_of(stored, self._configured, self._limits, active)

    def _forget(self, replica_id: str) -> bool:
        """Drop a replica but keep its counts; return False if it is unknown."""
        received = self._reports.pop(replica_id, None)
        self._request_rate.forget(replica_id)
        if received is not None:
            self._departed = self._departed.plus(received.report.counts)
        return received is not None

    def _remember(self, replica_id: str, counts: Counts) -> None:
        """Keep the counts of a silent replica apart, in case it returns."""
        self._silent[replica_id] = counts
        if len(self._silent) > _MAX_REMEMBERED:
            del self._silent[next(iter(self._silent))]


def _returning_refusals(method: Any) -> Any:
    """Return an async method that returns the errors of callers' values instead of raising them.

    Serve logs a traceback of every exception. `ControlClient` raises them.
    """

    @wraps(method)
    async def call(*arguments: Any, **named: Any) -> Any:
        try:
            return await method(*arguments, **named)
        except SpecdecError as error:
            return error

    return call


class ControlPlaneReplica(ControlPlane):
    """The ControlPlane as a Ray Serve deployment. Its process imports no torch."""

    set_speculation = _returning_refusals(ControlPlane.set_speculation)
    preview = _returning_refusals(ControlPlane.preview)
    audit_log = _returning_refusals(ControlPlane.audit_log)

    def __init__(
        self,
        configured: SpeculationControl | None,
        limits: OverrideLimits,
        directory: Path | None,
        card: ServiceCard,
        objective: Objective | None,
    ) -> None:
        """directory: for the store, on the node that it runs on; None for the default."""
        store = ControlStore(state_dir(directory), card.model)
        super().__init__(configured, store, limits=limits, objective=objective)
        self._card = card

    async def card(self) -> ServiceCard:
        """Return this application's description for Routers of other applications."""
        return self._card
