"""Orders for the versions of an engine's draft head: files are checked, then ranks load them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from specdec.engine.engine import Engine
from specdec.engine.engine_thread import EngineThread
from specdec.engine.loaded.drafter_versions import DrafterVersions
from specdec.models.heads.config import HeadConfig
from specdec.models.resolve import log_progress, portable_name, resolve
from specdec.types.drafters import DrafterOrder, DrafterReport, VersionState
from specdec.types.errors import NotReadyError, UnsupportedModelError

LOAD_TIMEOUT_S = 120.0
"""Wait for the ranks of a target to load a head, which can include a download."""

_POLL_S = 0.02


class DrafterControl:
    """Executes orders for an engine with a draft head, on an event loop."""

    def __init__(
        self,
        engine: Engine,
        versions: DrafterVersions,
        served: HeadConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """versions: those of the engine. served: the configured head, read without any options."""
        self._engine = engine
        self._versions = versions
        self._served = served
        self._clock = clock

    async def execute(
        self, order: DrafterOrder, thread: EngineThread, replica_id: str
    ) -> DrafterReport:
        """Execute an order; return when the version is in use.

        thread: the engine's. Raises InvalidValueError for an unknown version, ModelNotFoundError
        and UnsupportedModelError for files that cannot be used, OverloadedError while another
        version is being loaded, and NotReadyError while the ranks still load after LOAD_TIMEOUT_S.
        """
        versions, number = self._versions, order.version
        if order.path:
            name = portable_name(order.path)
            directory = await asyncio.to_thread(self._checked, name)
            number = await thread.call(lambda: versions.load(name, str(directory)))
        elif number:
            await thread.call(lambda: versions.use(number))
        if number:
            await self._wait(number, thread)
        if order.is_pinned is not None:
            await thread.call(lambda: setattr(versions, "is_pinned", order.is_pinned))
        return await thread.call(lambda: self._report(replica_id))

    def _checked(self, path: str) -> Path:
        """Return the directory of a head that can take the place of the served one."""
        directory = resolve(path, progress=log_progress, may_be_pickled=True)
        served = self._served
        if served.max_loaded_versions == 1:
            raise UnsupportedModelError(f"{served.method} cannot be replaced while it runs")
        HeadConfig.from_directory(directory, served.target).require_sizes_of(served)
        return directory

    async def _wait(self, number: int, thread: EngineThread) -> None:
        """Wait until the version is in use.

        Raises UnsupportedModelError where a rank cannot load it, and NotReadyError after
        LOAD_TIMEOUT_S: it is used as soon as it is loaded nevertheless.
        """
        ends_at_s = self._clock() + LOAD_TIMEOUT_S
        while not await thread.call(self._is_settled):
            if self._clock() >= ends_at_s:
                text = f"version {number} of the head is still loading"
                raise NotReadyError(f"{text}; see `specdec drafter list`")
            await asyncio.sleep(_POLL_S)
        found = await thread.call(self._versions.snapshot)
        version = next(each for each in found if each.number == number)
        if version.state is VersionState.FAILED:
            text = f"version {number} of the head, {version.name}, cannot be used"
            raise UnsupportedModelError(f"{text}: {version.fault}")

    def _is_settled(self) -> bool:
        """Return whether no version is being loaded; on the engine's thread, which may be idle."""
        self._engine.advance_drafters()
        return self._versions.is_settled

    def _report(self, replica_id: str) -> DrafterReport:
        versions = self._versions
        snapshot = versions.snapshot()
        return DrafterReport(replica_id, snapshot, versions.is_pinned, versions.num_rollbacks)
