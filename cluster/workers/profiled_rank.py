"""A rank whose steps can be profiled while it serves."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster.workers import serialization
from cluster.workers.profile_messages import ShardOrder, is_for_profiles, order_in
from cluster.workers.rank import Rank
from specdec.types.profile import WorkerProfile
from specdec.worker import StepProfiler

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Profile:
    order: ShardOrder
    profiler: StepProfiler

    @property
    def is_over(self) -> bool:
        return self.profiler.num_steps >= self.order.num_steps


class ProfiledRank:
    """Hands steps to a rank, and records them while a profile is taken. One at a time."""

    def __init__(self, rank: Rank, number: int) -> None:
        """number: of the rank in its group."""
        self.runner = rank.runner
        self._rank = rank
        self._number = number
        self._profile: _Profile | None = None

    def run(self, frames: serialization.Frames) -> Iterator[serialization.Frames]:
        """Runs a step, or begins or ends a profile. Its answers, and a report where one is over."""
        if is_for_profiles(frames):
            yield from self._heed(order_in(frames))
        elif self._profile is None:
            yield from self._rank.run(frames)
        else:
            yield from self._run_profiled(frames, self._profile)

    def _run_profiled(
        self, frames: serialization.Frames, profile: _Profile
    ) -> Iterator[serialization.Frames]:
        with profile.profiler.step():
            yield from self._rank.run(frames)
        if profile.is_over:
            yield self._end(profile)

    def _heed(self, order: ShardOrder | None) -> Iterator[serialization.Frames]:
        """Whatever goes wrong with a profile is reported, and no step notices.

        An order that comes while a profile runs takes its place: nobody waits for that one.
        """
        if order is None:
            if self._profile is not None:
                yield self._end(self._profile)
            return
        try:
            self._drop()
            Path(order.directory).mkdir(mode=0o700, parents=True, exist_ok=True)
            self._profile = _Profile(order, StepProfiler(self.runner))
        except Exception as error:
            yield self._failure(order, error, 0)

    def _drop(self) -> None:
        """Stops the profile that runs, if one does, and writes nothing."""
        dropped, self._profile = self._profile, None
        if dropped is not None:
            dropped.profiler.stop()

    def _end(self, profile: _Profile) -> serialization.Frames:
        self._profile = None
        order, num_steps = profile.order, profile.profiler.num_steps
        name = f"{order.worker.replace(' ', '-')}-rank-{self._number}.json.gz"
        path = Path(order.directory) / name
        try:
            saved = profile.profiler.save(path, order.max_bytes)
        except Exception as error:
            return self._failure(order, error, num_steps)
        is_there = saved.size_bytes > 0
        return order.report(
            WorkerProfile(
                order.worker,
                self._number,
                num_steps,
                trace_path=str(path) if is_there else "",
                trace_bytes=saved.size_bytes,
                operations=saved.operations,
                fault="" if is_there else f"the trace is larger than {order.max_bytes} bytes",
            )
        )

    def _failure(self, order: ShardOrder, error: Exception, num_steps: int) -> serialization.Frames:
        logger.error("no profile could be taken", exc_info=error)
        fault = f"{type(error).__name__}: {error}"
        return order.report(WorkerProfile(order.worker, self._number, num_steps, fault=fault))
