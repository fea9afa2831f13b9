"""Streams of the fleet's statistics, until the client leaves or the replica drains."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress

from specdec.types.errors import InvalidValueError, NotReadyError, OverloadedError
from specdec.types.fleet import FleetStatistics

MIN_INTERVAL_S = 0.2
MAX_INTERVAL_S = 60.0
DEFAULT_INTERVAL_S = 1.0
MAX_WATCHERS = 64
"""Limit per replica. Each watcher costs one call to the control plane per interval."""


class StatsStreams:
    """The statistics streams of one replica."""

    def __init__(self, fleet: Callable[[], Awaitable[FleetStatistics]]) -> None:
        """fleet: queries the control plane; NotReadyError ends a stream."""
        self._fleet = fleet
        self.num_watchers = 0
        self._is_draining = asyncio.Event()

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
        if self.num_watchers >= MAX_WATCHERS:
            raise OverloadedError(f"too many watchers on this replica (limit {MAX_WATCHERS})")
        self.num_watchers += 1
        try:
            while not self._is_draining.is_set():
                yield await self._fleet()
                with suppress(TimeoutError):
                    async with asyncio.timeout(interval_s or DEFAULT_INTERVAL_S):
                        await self._is_draining.wait()
        finally:
            self.num_watchers -= 1
        raise NotReadyError("the service is draining; watch another replica")
