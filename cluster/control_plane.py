"""The one place that knows what operators want of a service, and how its replicas are.

It decides nothing about requests. While it is away, Routers go on as they were last told.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cluster.control_store import ControlStore, StoredSpeculation
from specdec.client import (
    ReplicaReport,
    ReplicaStatus,
    ServiceStatus,
    SpeculationChange,
    SpeculationState,
)
from specdec.errors import InvalidValueError, VersionConflictError
from specdec.speculation import SpeculationControl

logger = logging.getLogger(__name__)

SILENCE_LIMIT_S = 90.0
"""How long a replica may say nothing before it counts as lost; a step may take long."""

_NO_SPECULATION = SpeculationControl("off", threshold=0, num_speculative_tokens=0)


@dataclass(frozen=True)
class _Heard:
    """A report, when it came, and when its replica started, both by the clock here."""

    report: ReplicaReport
    started_at_s: float
    heard_at_s: float


class ControlPlane:
    """Keeps what operators want, tells it to whoever watches, and gathers reports.

    For one event loop. Its methods are coroutines because they are called from other processes.
    """

    def __init__(
        self,
        configured: SpeculationControl | None,
        store: ControlStore,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`configured` holds where no operator has said otherwise; None: nothing can draft."""
        self._configured = configured
        self._store = store
        self._clock = clock
        self._wall_clock = wall_clock
        self._state = self._state_of(store.read())
        self._changed = asyncio.Event()
        self._heard: dict[str, _Heard] = {}
        self._num_lost = 0

    async def speculation(self) -> SpeculationState:
        """What is wanted of speculation."""
        return self._state

    async def set_speculation(self, change: SpeculationChange) -> SpeculationState:
        """Stores a change, wakes the watchers, and returns what is in force then.

        Raises VersionConflictError when the state is not of the expected version, and
        InvalidValueError when the service was started without speculation.
        """
        if self._configured is None:
            limit = "one that drafts, for speculation to be changed; the service has none"
            raise InvalidValueError("speculative_config", "none", limit)
        before = self._store.read()
        expected = change.expected_version
        if expected is not None and expected != before.version:
            raise VersionConflictError(expected, before.version)
        after = StoredSpeculation(
            version=before.version + 1,
            overrides={**({} if change.reset else before.overrides), **change.values},
            updated_at_s=self._wall_clock(),
            updated_by=change.updated_by,
            reason=change.reason,
        )
        if not self._store.replace(after):
            raise VersionConflictError(before.version, self._store.read().version)
        self._announce(self._state_of(after))
        return self._state

    async def watch(self, known_version: int | None, timeout_s: float) -> SpeculationState:
        """The state as soon as it is of another version, else after `timeout_s` seconds."""
        if self._state.version == known_version:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
        return self._state

    async def report(self, report: ReplicaReport, uptime_s: float) -> None:
        """Takes note of what a replica says of itself."""
        now_s = self._clock()
        self._heard[report.replica_id] = _Heard(report, now_s - uptime_s, now_s)

    async def leave(self, replica_id: str, *, has_failed: bool) -> None:
        """Forgets a replica that ends."""
        if self._heard.pop(replica_id, None) is not None:
            self._num_lost += has_failed

    async def status(self) -> ServiceStatus:
        """Every replica heard of lately, and what is wanted of speculation."""
        now_s = self._clock()
        self._forget_the_silent(now_s)
        return ServiceStatus(
            replicas=tuple(
                ReplicaStatus(each.report, now_s - each.started_at_s, now_s - each.heard_at_s)
                for each in sorted(self._heard.values(), key=lambda each: each.started_at_s)
            ),
            speculation=self._state,
            num_lost_replicas=self._num_lost,
        )

    def _forget_the_silent(self, now_s: float) -> None:
        for replica_id, each in list(self._heard.items()):
            if now_s - each.heard_at_s > SILENCE_LIMIT_S:
                del self._heard[replica_id]
                self._num_lost += 1

    def _announce(self, state: SpeculationState) -> None:
        self._state = state
        self._changed.set()  # for those who watch now; who comes later sees the version
        self._changed = asyncio.Event()
        logger.info("speculation: %s", state)

    def _state_of(self, stored: StoredSpeculation) -> SpeculationState:
        configured, overrides = self._configured, stored.overrides
        if configured is None:  # what was set when the service could draft waits for that time
            configured, overrides = _NO_SPECULATION, {}
        values = {name: overrides.get(name, value) for name, value in vars(configured).items()}
        has_changed = stored.version > 0
        return SpeculationState(
            in_force=SpeculationControl(**values),
            configured=configured,
            overridden=tuple(name for name in values if name in overrides),
            version=stored.version,
            updated_at=datetime.fromtimestamp(stored.updated_at_s, UTC) if has_changed else None,
            updated_by=stored.updated_by,
            reason=stored.reason,
        )


class ControlPlaneReplica(ControlPlane):
    """The ControlPlane as Ray Serve makes it. Light: its process loads no model and no torch."""

    def __init__(
        self, configured: SpeculationControl | None, state_dir: Path, service: str
    ) -> None:
        super().__init__(configured, ControlStore(state_dir, service))
