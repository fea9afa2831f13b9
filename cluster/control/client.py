"""A Router's end of the line to the ControlPlane.

It watches for what operators want, reports how the Router is, and passes operators' calls on. The
line may break at any time: what was wanted last stays in force, and it is tried again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from cluster.control.timeseries import Figures
from specdec.types.control_changes import (
    AuditPage,
    SpeculationChange,
    SpeculationPreview,
    SpeculationState,
    StateStamp,
)
from specdec.types.errors import NotReadyError
from specdec.types.fleet import FleetStatistics, ReplicaReport, ReplicaStatus, ServiceStatus

logger = logging.getLogger(__name__)

_REPORT_PERIOD_S = 1.0
_IDLE_REPORT_PERIOD_S = 30.0
_WATCH_S = 5.0
"""A change is answered to the watch of a replica that was killed too, and comes a second later to
the others then. So a watch must not outlast its replica for long."""

_CALL_TIMEOUT_S = 3.0
_GOODBYE_S = 0.5  # the ControlPlane may have ended first
_FIRST_RETRY_S = 0.1
_LAST_RETRY_S = 1.0

_AWAY = "the control plane does not answer; speculation goes on as it was last set; try again later"


class ControlLink:
    """Calls a ControlPlane through a Serve handle, for one Router."""

    def __init__(
        self,
        control_plane: Any,
        apply: Callable[[SpeculationState], Awaitable[None]],
        report: Callable[[], ReplicaReport],
        *,
        call_timeout_s: float = _CALL_TIMEOUT_S,
    ) -> None:
        """`control_plane` is a handle: `.method.remote(...)` returns what can be awaited.

        apply: has the Router go by a state. report: asks the Router how it is.
        """
        self._plane = control_plane
        self._apply = apply
        self._make_report = report
        self._call_timeout_s = call_timeout_s
        self._started_at_s = time.monotonic()
        self._is_connected = False
        self._reported: ReplicaReport | None = None
        self._reported_at_s = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._has_applied = asyncio.Event()  # a state that the ControlPlane does not know of

    def start(self) -> None:
        """Watches and reports from now on."""
        self._tasks = [
            asyncio.create_task(self._watch_on()),
            asyncio.create_task(self._report_on()),
        ]

    async def close(self, replica_id: str, *, has_failed: bool) -> None:
        """Stops both, and says goodbye where somebody listens."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with suppress(NotReadyError):
            await self._call(
                self._plane.leave, replica_id, has_failed=has_failed, timeout_s=_GOODBYE_S
            )

    async def speculation(self) -> SpeculationState:
        """What is wanted of speculation. Raises NotReadyError while the ControlPlane is away."""
        state: SpeculationState = await self._call(self._plane.speculation)
        return state

    async def set_speculation(self, change: SpeculationChange) -> SpeculationState:
        """Passes a change on. Raises NotReadyError, and what the ControlPlane raises."""
        state: SpeculationState = await self._call(self._plane.set_speculation, change)
        return state

    async def status(self) -> ServiceStatus:
        """How the service runs, this replica as of now. Raises NotReadyError as above."""
        await self._report(self._make_report())
        status: ServiceStatus = await self._call(self._plane.status)
        return status

    @property
    def is_connected(self) -> bool:
        """Whether the ControlPlane answered when it was last called."""
        return self._is_connected

    def own_status(self) -> ReplicaStatus:
        """This replica alone, as of now. At once, whether the ControlPlane is away or not."""
        return ReplicaStatus(self._make_report(), self._uptime_s, age_s=0.0)

    async def fleet(self) -> FleetStatistics:
        """All replicas at this moment, as they last reported. Raises NotReadyError as above."""
        fleet: FleetStatistics = await self._call(self._plane.fleet)
        return fleet

    async def fresh_fleet(self) -> FleetStatistics:
        """The same, with this replica as of now. Raises NotReadyError as above."""
        await self._report(self._make_report())
        return await self.fleet()

    async def history(self, after_s: float) -> tuple[Figures, ...]:
        """The points of charts after a time, in seconds since 1970. Raises NotReadyError."""
        figures: tuple[Figures, ...] = await self._call(self._plane.history, after_s)
        return figures

    async def preview(self, change: SpeculationChange | None) -> SpeculationPreview:
        """What a change would mean now. Raises InvalidValueError and NotReadyError."""
        preview: SpeculationPreview = await self._call(self._plane.preview, change)
        return preview

    async def audit_log(self, page_size: int, page_token: str) -> AuditPage:
        """A page of changes, the newest first. Raises InvalidValueError and NotReadyError."""
        page: AuditPage = await self._call(self._plane.audit_log, page_size, page_token)
        return page

    async def _watch_on(self) -> None:
        known: StateStamp | None = None
        retry_s = _FIRST_RETRY_S
        while True:
            try:
                state = await self._watch(known)
            except Exception as error:
                if not isinstance(error, NotReadyError):
                    logger.exception("watching the control plane failed")
                elif retry_s == _FIRST_RETRY_S:
                    logger.warning("the control plane does not answer; speculation stays as it is")
                known = None  # another ControlPlane may count from elsewhere,
                self._reported = None  # and has not heard of this replica
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, _LAST_RETRY_S)
                continue
            retry_s = _FIRST_RETRY_S
            if state.stamp != known:
                known = state.stamp
                await self._apply(state)
                self._has_applied.set()

    async def _watch(self, known: StateStamp | None) -> SpeculationState:
        """The state at once where none is known, else when it changes or after a while."""
        state: SpeculationState = await self._call(
            self._plane.watch,
            known,
            _WATCH_S,
            timeout_s=_WATCH_S + self._call_timeout_s,
        )
        return state

    async def _report_on(self) -> None:
        while True:
            try:
                await self._report_if_due(self._make_report())
            except NotReadyError:
                pass  # the watch logs that nobody answers
            except Exception:
                logger.exception("a report to the control plane failed")
            await self._pause()

    async def _pause(self) -> None:
        """Until the next report; none, once another state is in force: operators wait for that."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_REPORT_PERIOD_S):
                await self._has_applied.wait()
        self._has_applied.clear()

    async def _report_if_due(self, report: ReplicaReport) -> None:
        idle_s = time.monotonic() - self._reported_at_s
        if report != self._reported or idle_s >= _IDLE_REPORT_PERIOD_S:
            await self._report(report)

    async def _report(self, report: ReplicaReport) -> None:
        await self._call(self._plane.report, report, self._uptime_s)
        self._reported, self._reported_at_s = report, time.monotonic()

    @property
    def _uptime_s(self) -> float:
        return time.monotonic() - self._started_at_s

    async def _call(
        self, method: Any, *arguments: Any, timeout_s: float | None = None, **named: Any
    ) -> Any:
        """Raises NotReadyError when no answer comes, and what the ControlPlane raised itself."""
        response = method.remote(*arguments, **named)
        try:
            async with asyncio.timeout(timeout_s or self._call_timeout_s):
                answer = await response
        except RayTaskError as error:
            self._is_connected = True
            raise error.cause from error
        except (RayError, RayServeException) as error:
            self._is_connected = False
            raise NotReadyError(_AWAY) from error
        except TimeoutError as error:
            self._is_connected = False
            response.cancel()
            raise NotReadyError(_AWAY) from error
        except asyncio.CancelledError:
            response.cancel()  # else the ControlPlane would go on with it
            raise
        self._is_connected = True
        return answer
