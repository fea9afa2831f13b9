"""Profiles of a replica's models, one at a time, within limits of steps, bytes and seconds."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.workers.messages.profile_messages import WRITING_S, WorkerProfileOrder
from specdec.types.errors import (
    InvalidValueError,
    NotReadyError,
    OverloadedError,
    TargetFailedError,
)
from specdec.types.reports.profile import ProfileOrder, ProfileReport, WorkerProfile

if TYPE_CHECKING:
    from cluster.workers.groups.supervisors import Supervisor

    Model = Supervisor[Any, Any]

OnEngineThread = Callable[[Callable[[], Any]], Awaitable[Any]]

_POLL_S = 0.05
_MIB = 2**20


class Profiling:
    """Takes the profiles of one replica."""

    def __init__(
        self,
        directory: Path | None,
        max_mib: int,
        replica: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the limits.

        directory: for traces, on the ranks' node; None disables profiles. max_mib: of all traces of
        a profile together. clock: monotonic, in seconds.
        """
        self._clock = clock
        self._directory = directory
        self._max_bytes = max_mib * _MIB
        self._replica = replica
        self._running: asyncio.Task[ProfileReport] | None = None

    async def take(
        self, order: ProfileOrder, models: Mapping[str, Model], call: OnEngineThread
    ) -> ProfileReport:
        """Profile the models by name, to the end even if the caller is cancelled.

        call: runs a function on the engine's thread. Raises InvalidValueError where profiles are
        disabled, OverloadedError while one is active, and NotReadyError while the first model, the
        target, is restarting, and when ranks do not report.
        """
        if self._directory is None:
            limit = "a directory for profiles; start the service with --profile-dir"
            raise InvalidValueError("profile_dir", None, limit)
        if self._running is not None and not self._running.done():
            raise OverloadedError("a profile is being taken; ask again when it is done")
        # A unique name that sorts by time.
        name = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        directory = self._directory / name
        self._running = asyncio.create_task(self._take(order, models, call, directory))
        return await asyncio.shield(self._running)

    async def _take(
        self,
        order: ProfileOrder,
        models: Mapping[str, Model],
        call: OnEngineThread,
        directory: Path,
    ) -> ProfileReport:
        began_at = self._clock()
        sizes = {name: n for name, model in models.items() if (n := model.num_ranks)}
        if next(iter(models)) not in sizes:
            raise NotReadyError("the model is starting again; ask for a profile when it is ready")
        max_bytes = self._max_bytes // sum(sizes.values())

        def begin() -> None:
            for name in sizes:
                each = WorkerProfileOrder(name, order.num_steps, str(directory), max_bytes)
                models[name].begin_profile(each)

        present = [models[name] for name in sizes]
        try:
            await call(begin)
            workers = await self._collect(present, call, began_at + order.timeout_s)
        except BaseException:
            with suppress(NotReadyError, TargetFailedError):  # the engine and the models have ended
                await call(lambda: _end(present))
            raise
        return ProfileReport(self._replica, self._clock() - began_at, workers)

    async def _collect(
        self, models: Sequence[Model], call: OnEngineThread, ends_at: float
    ) -> tuple[WorkerProfile, ...]:
        """Wait for all reports; end the profile when the first model, the target, has ended.

        ends_at: when to end it at the latest.
        """
        is_ending = False
        while self._clock() < ends_at + WRITING_S:
            reports = await call(lambda: [model.collect_profile() for model in models])
            if all(each is not None for each in reports):
                workers = tuple(worker for each in reports for worker in each)
                if not workers:
                    raise NotReadyError("the models were lost while they were profiled")
                return workers
            if not is_ending and (reports[0] is not None or self._clock() >= ends_at):
                await call(lambda: _end(models))
                is_ending = True
            await asyncio.sleep(_POLL_S)
        raise NotReadyError("the models did not report their profiles; see the service's log")


def _end(models: Iterable[Model]) -> None:
    """End the profiles; on the engine's thread."""
    for model in models:
        model.end_profile()
