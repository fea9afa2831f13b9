"""Profiles of a replica's models, one at a time, within limits of steps, bytes and seconds."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from cluster.workers.profile_messages import ShardOrder
from specdec.types.errors import (
    InvalidValueError,
    NotReadyError,
    OverloadedError,
    TargetFailedError,
)
from specdec.types.profile import ProfileOrder, ProfileReport, WorkerProfile

WRITING_S = 60.0
"""How long ranks may take to write their traces when they are told to end."""

_LOOK_EVERY_S = 0.05
_MIB = 2**20


class ProfiledModel(Protocol):
    """The target or the draft model. To be called on the engine's thread, between two steps."""

    @property
    def num_ranks(self) -> int:
        """How many traces there will be; 0 while the model is away."""

    def begin_profile(self, order: ShardOrder) -> None:
        """Has every rank begin; does not wait."""

    def end_profile(self) -> None:
        """Has the ranks end that have not; does not wait."""

    def collect_profile(self) -> tuple[WorkerProfile, ...] | None:
        """The reports of all ranks, none if the model was lost; None until they have come.

        Does not wait, and may be called again.
        """


OnEngineThread = Callable[[Callable[[], Any]], Awaitable[Any]]


class Profiling:
    """Takes the profiles of one replica."""

    def __init__(self, directory: Path | None, max_mib: int, replica: str) -> None:
        """directory: where traces go, on the ranks' node; None: no profile is ever taken.

        max_mib: of all traces of a profile together.
        """
        self._directory = directory
        self._max_bytes = max_mib * _MIB
        self._replica = replica
        self._running: asyncio.Task[ProfileReport] | None = None

    async def take(
        self, order: ProfileOrder, models: dict[str, ProfiledModel], call: OnEngineThread
    ) -> ProfileReport:
        """Profiles the models by name. It goes on to its end when the caller has left.

        call: runs a function on the engine's thread. Raises InvalidValueError where profiles are
        off, OverloadedError while one is taken, and NotReadyError while the first model, which is
        the target, is away, and when ranks do not report.
        """
        if self._directory is None:
            limit = "a directory, for profiles to be taken; the service was started without one"
            raise InvalidValueError("profile_dir", "none", limit)
        if self._running is not None and not self._running.done():
            raise OverloadedError("a profile is being taken; ask again when it is done")
        directory = self._directory / _new_name()
        self._running = asyncio.create_task(self._take(order, models, call, directory))
        return await asyncio.shield(self._running)

    async def _take(
        self,
        order: ProfileOrder,
        models: dict[str, ProfiledModel],
        call: OnEngineThread,
        directory: Path,
    ) -> ProfileReport:
        began_at = time.monotonic()
        sizes = {name: model.num_ranks for name, model in models.items()}
        if not next(iter(sizes.values())):
            raise NotReadyError("the model is starting again; ask for a profile when it is ready")
        present = {name: models[name] for name, size in sizes.items() if size}
        max_bytes = self._max_bytes // sum(sizes.values())
        orders = {
            name: ShardOrder(name, order.num_steps, str(directory), max_bytes) for name in present
        }

        def begin() -> None:
            for name, model in present.items():
                model.begin_profile(orders[name])

        try:
            await call(begin)
            workers = await _collect(list(present.values()), call, began_at + order.timeout_s)
        except BaseException:
            with suppress(NotReadyError, TargetFailedError):  # the engine has ended, and its models
                await call(lambda: _end(present.values()))
            raise
        return ProfileReport(self._replica, time.monotonic() - began_at, workers)


async def _collect(
    models: Sequence[ProfiledModel], call: OnEngineThread, ends_at: float
) -> tuple[WorkerProfile, ...]:
    """All end when the first, which is the target, has ended, or when the time is up."""
    is_told = False
    while time.monotonic() < ends_at + WRITING_S:
        reports = await call(lambda: [model.collect_profile() for model in models])
        if all(each is not None for each in reports):
            workers = tuple(worker for each in reports for worker in each)
            if not workers:
                raise NotReadyError("the models were lost while they were profiled")
            return workers
        if not is_told and (reports[0] is not None or time.monotonic() >= ends_at):
            await call(lambda: _end(models))
            is_told = True
        await asyncio.sleep(_LOOK_EVERY_S)
    raise NotReadyError("the models did not report their profiles; the service's log may say why")


def _end(models: Iterable[ProfiledModel]) -> None:
    """To be called on the engine's thread."""
    for model in models:
        model.end_profile()


def _new_name() -> str:
    """Sorts by time, and is nobody else's."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
