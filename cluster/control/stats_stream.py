"""Streams of the fleet's statistics, until the client leaves or the replica drains."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable

from specdec.types.errors import InvalidValueError, NotReadyError, OverloadedError
from specdec.types.fleet import FleetStatistics

MIN_INTERVAL_S = 0.2
MAX_INTERVAL_S = 60.0
DEFAULT_INTERVAL_S = 1.0
MAX_WATCHERS = 64
"""Limit per replica. Each watcher costs one call to the control plane per interval."""

_DRAINING = "the service is draining; watch another replica"


class StatsStreams:
    """The statistics streams of one replica."""

    def __init__(self, fleet: Callable[[], Awaitable[FleetStatistics]]) -> None:
        """fleet: asks the control plane; it may raise NotReadyError, which ends a stream."""
        self._fleet = fleet
        self._num_watchers = 0
        self._is_draining = asyncio.Event()

    @property
    def num_watchers(self) -> int:
        """The number of open streams."""
        return self._num_watchers

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
            shown = interval_s if math.isfinite(interval_s) else str(interval_s)
            raise InvalidValueError("interval_s", shown, limit)
        if self._num_watchers >= MAX_WATCHERS:
            raise OverloadedError(f"too many watchers on this replica (limit {MAX_WATCHERS})")
        self._num_watchers += 1
        try:
            while not self._is_draining.is_set():
                yield await self._fleet()
                await self._pause(interval_s or DEFAULT_INTERVAL_S)
        finally:
            self._num_watchers -= 1
        raise NotReadyError(_DRAINING)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._is_draining.wait()
        except TimeoutError:
            pass
