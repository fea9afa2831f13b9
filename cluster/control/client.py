"""A Router's client of the ControlPlane, and the streams of statistics that use it.

It watches for the operators' settings, reports the Router's state, and forwards operators' calls.
While the ControlPlane is unavailable, the last settings stay in force and calls are retried.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from cluster.control.timeseries import Figures
from specdec.types.control import (
    AuditPage,
    SpeculationChange,
    SpeculationPreview,
    SpeculationState,
    StateStamp,
)
from specdec.types.errors import InvalidValueError, NotReadyError, OverloadedError, SpecdecError
from specdec.types.reports.fleet import FleetStatistics, ReplicaReport, ReplicaStatus, ServiceStatus

logger = logging.getLogger(__name__)

T = TypeVar("T")

MIN_INTERVAL_S = 0.2
"""Also how long statistics are shared: the control plane is asked no more often, however many
watchers there are."""
MAX_INTERVAL_S = 60.0
DEFAULT_INTERVAL_S = 1.0
MAX_WATCHERS = 64
"""Limit per replica."""

_REPORT_PERIOD_S = 1.0
_IDLE_REPORT_PERIOD_S = 30.0
_WATCH_S = 5.0
"""A change is also sent to the watch of a killed replica, which delays the others by a second. So a
watch must not outlast its replica for long."""

_CALL_TIMEOUT_S = 3.0
_LEAVE_TIMEOUT_S = 0.5  # the ControlPlane may have ended first
_FIRST_RETRY_S = 0.1
_LAST_RETRY_S = 1.0

_UNAVAILABLE = (
    "the control plane does not answer; speculation stays as it was last set; try again later"
)


class ControlClient:
    """Client of a ControlPlane through a Serve handle, for one Router.

    is_connected: whether the ControlPlane answered the last call. replicas_needed: for the
    objective, by the answer to the last report; None while it is unknown.
    """

    def __init__(
        self,
        control_plane: Any,
        apply: Callable[[SpeculationState], Awaitable[None]],
        report: Callable[[], ReplicaReport],
        *,
        call_timeout_s: float = _CALL_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """control_plane: a handle; `.method.remote(...)` returns an awaitable.

        apply: puts a state in force in the Router. report: returns the Router's state. clock:
        monotonic, in seconds.
        """
        self._plane = control_plane
        self._apply = apply
        self._make_report = report
        self._call_timeout_s = call_timeout_s
        self._clock = clock
        self._started_at_s = clock()
        self.is_connected = False
        self.replicas_needed: int | None = None
        self._reported: ReplicaReport | None = None
        self._reported_at_s = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._has_applied = asyncio.Event()  # a state, not reported yet

    def start(self) -> None:
        """Start watching and reporting."""
        self._tasks = [
            asyncio.create_task(self._watch()),
            asyncio.create_task(self._report_periodically()),
        ]

    async def close(self, replica_id: str, *, has_failed: bool) -> None:
        """Stop both and unregister, if the ControlPlane is available."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with suppress(NotReadyError):
            await self._call(
                self._plane.leave, replica_id, has_failed=has_failed, timeout_s=_LEAVE_TIMEOUT_S
            )

    async def speculation(self) -> SpeculationState:
        """Return the settings in force. Raises NotReadyError without the ControlPlane."""
        return await self._call(self._plane.speculation)

    async def set_speculation(self, change: SpeculationChange) -> SpeculationState:
        """Forward a change. Raises NotReadyError, and what the ControlPlane raises."""
        return await self._call(self._plane.set_speculation, change)

    async def status(self) -> ServiceStatus:
        """Return the service's status, with this replica's current one. Raises NotReadyError."""
        await self._report(self._make_report())
        return await self._call(self._plane.status)

    def own_status(self) -> ReplicaStatus:
        """Return this replica's current status, without the ControlPlane."""
        return ReplicaStatus(self._make_report(), self._uptime_s, age_s=0.0)

    async def fleet(self) -> FleetStatistics:
        """Return all replicas as they last reported. Raises NotReadyError."""
        return await self._call(self._plane.fleet)

    async def fresh_fleet(self) -> FleetStatistics:
        """Return all replicas, with the current state of this one. Raises NotReadyError."""
        await self._report(self._make_report())
        return await self.fleet()

    async def history(self, after_s: float) -> tuple[Figures, ...]:
        """Return the charts' points after a time, in seconds since 1970. Raises NotReadyError."""
        return await self._call(self._plane.history, after_s)

    async def preview(self, change: SpeculationChange | None) -> SpeculationPreview:
        """Return the effect of a change now. Raises InvalidValueError and NotReadyError."""
        return await self._call(self._plane.preview, change)

    async def audit_log(self, page_size: int, page_token: str) -> AuditPage:
        """Return a page of changes, newest first. Raises InvalidValueError and NotReadyError."""
        return await self._call(self._plane.audit_log, page_size, page_token)

    async def _watch(self) -> None:
        known: StateStamp | None = None
        retry_s = _FIRST_RETRY_S
        logged: type[Exception] | None = None  # not again in each attempt
        while True:
            try:
                state = await self._call(
                    self._plane.watch,
                    known,
                    _WATCH_S,
                    timeout_s=_WATCH_S + self._call_timeout_s,
                )
                if state.stamp != known:
                    await self._apply(state)  # may refuse a state made for another configuration
                    known = state.stamp
                    self._has_applied.set()
                retry_s, logged = _FIRST_RETRY_S, None
            except Exception as error:
                if type(error) is not logged:
                    _log_watch_failure(error)
                logged = type(error)
                known = None  # a restarted ControlPlane may have other versions,
                self._reported = None  # and has no report of this replica
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, _LAST_RETRY_S)

    async def _report_periodically(self) -> None:
        was_news = False
        while True:
            try:
                report, idle_s = self._make_report(), self._clock() - self._reported_at_s
                is_news = report != self._reported
                if is_news or was_news or idle_s >= _IDLE_REPORT_PERIOD_S:
                    await self._report(report)
                was_news = is_news  # once more without, so that its absence is no lost report
            except Exception as error:
                self.replicas_needed = None
                if not isinstance(error, NotReadyError):  # which the watch logs
                    logger.exception("a report to the control plane failed")
            with suppress(TimeoutError):  # reports at once that a new state is in force
                async with asyncio.timeout(_REPORT_PERIOD_S):
                    await self._has_applied.wait()
            self._has_applied.clear()

    async def _report(self, report: ReplicaReport) -> None:
        self.replicas_needed = await self._call(self._plane.report, report, self._uptime_s)
        self._reported, self._reported_at_s = report, self._clock()

    @property
    def _uptime_s(self) -> float:
        return self._clock() - self._started_at_s

    async def _call(
        self,
        method: Callable[..., T],
        *arguments: Any,
        timeout_s: float | None = None,
        **named: Any,
    ) -> T:
        """Call a method of the handle. Raises NotReadyError without an answer, and what it raised.

        T: of the answer, since the handle has no types.
        """
        from ray.exceptions import RayError, RayTaskError
        from ray.serve.exceptions import RayServeException

        remote: Any = method
        response = remote.remote(*arguments, **named)
        try:
            async with asyncio.timeout(timeout_s or self._call_timeout_s):
                answer: T = await response
        except RayTaskError as error:
            self.is_connected = True
            raise error.cause from error
        except (RayError, RayServeException, TimeoutError) as error:
            self.is_connected = False
            if isinstance(error, TimeoutError):
                response.cancel()
            raise NotReadyError(_UNAVAILABLE) from error
        except asyncio.CancelledError:
            response.cancel()  # else the ControlPlane would continue the call
            raise
        self.is_connected = True
        if isinstance(answer, SpecdecError):
            raise answer
        return answer


def _log_watch_failure(error: Exception) -> None:
    if isinstance(error, NotReadyError):
        logger.warning("the control plane does not answer; speculation stays as it is")
    elif isinstance(error, SpecdecError):
        logger.warning("settings of the control plane are not in force: %s", error)
    else:
        logger.error("watching the control plane failed", exc_info=error)


class StatsStreams:
    """The statistics streams of one replica."""

    def __init__(self, fleet: Callable[[], Awaitable[FleetStatistics]]) -> None:
        """fleet: queries the control plane; NotReadyError ends a stream."""
        self._fleet = fleet
        self.num_watchers = 0
        self._is_draining = asyncio.Event()
        self._query: asyncio.Future[FleetStatistics] | None = None
        self._queried_at_s = 0.0  # by the event loop's clock
        self._encoded: dict[Callable[[FleetStatistics], Any], tuple[FleetStatistics, Any]] = {}

    def drain(self) -> None:
        """End every stream and refuse new ones."""
        self._is_draining.set()

    async def watch(self, interval_s: float) -> AsyncGenerator[FleetStatistics, None]:
        """Yield the statistics now and then every `interval_s` seconds; 0 stands for one second.

        Ends with NotReadyError when the replica drains. Raises InvalidValueError and
        OverloadedError before the first.
        """
        if interval_s != 0 and not MIN_INTERVAL_S <= interval_s <= MAX_INTERVAL_S:
            limit = f"a number of seconds from {MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g}, or 0"
            raise InvalidValueError("interval_s", interval_s, limit)
        if self.num_watchers >= MAX_WATCHERS:
            raise OverloadedError(f"too many watchers on this replica (limit {MAX_WATCHERS})")
        self.num_watchers += 1
        try:
            while not self._is_draining.is_set():
                yield await self._shared_fleet()
                with suppress(TimeoutError):
                    async with asyncio.timeout(interval_s or DEFAULT_INTERVAL_S):
                        await self._is_draining.wait()
        finally:
            self.num_watchers -= 1
        raise NotReadyError("the service is draining; watch another replica")

    def encoded(self, fleet: FleetStatistics, encode: Callable[[FleetStatistics], T]) -> T:
        """Return `encode(fleet)`, computed once for all watchers that got these statistics.

        encode: a function that is the same for all calls.
        """
        known = self._encoded.get(encode)
        if known is None or known[0] is not fleet:
            known = self._encoded[encode] = (fleet, encode(fleet))
        result: T = known[1]
        return result

    async def _shared_fleet(self) -> FleetStatistics:
        """Return statistics that are younger than MIN_INTERVAL_S."""
        now_s = asyncio.get_running_loop().time()
        if self._query is None or now_s - self._queried_at_s >= MIN_INTERVAL_S:
            self._query, self._queried_at_s = asyncio.ensure_future(self._fleet()), now_s
        return await asyncio.shield(self._query)  # other watchers may wait for it too
