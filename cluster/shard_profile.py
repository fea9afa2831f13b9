"""Profiles of ranks: what a Router orders, how a rank takes one, and how the Router collects them.

Orders and reports travel between the messages of steps, in order, so a profile begins and ends
between two steps on every rank, and nothing is done for it while there is none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgpack

from specdec.profile import OperationTime, WorkerProfile
from specdec.runner import Runner, StepProfiler

logger = logging.getLogger(__name__)

Frames = list[bytes]

END: Frames = [b"end profile"]

_BEGIN = b"profile"
_REPORT = b"profiled"


@dataclass(frozen=True)
class ShardOrder:
    """What the ranks of a group are to do.

    num_steps: after which a rank ends its profile, unless it is told to before. directory: for the
    trace, on the rank's node; made if it is not there. max_bytes: of one rank's trace.
    """

    worker: str
    num_steps: int
    directory: str
    max_bytes: int

    def encode(self) -> Frames:
        """The message for every rank."""
        return [_BEGIN, msgpack.packb(asdict(self))]

    def report(self, profile: WorkerProfile) -> Frames:
        """The message that a rank answers with."""
        return [_REPORT, self.directory.encode(), msgpack.packb(asdict(profile))]


@dataclass(frozen=True)
class _Running:
    order: ShardOrder
    profiler: StepProfiler


class ShardProfiling:
    """What a rank does about profiles. At most one runs."""

    def __init__(self, rank: int, runner: Runner) -> None:
        self._rank = rank
        self._runner = runner
        self._running: _Running | None = None

    @property
    def is_running(self) -> bool:
        """Whether the next step is to be run by `run_step`."""
        return self._running is not None

    def heed(self, frames: Frames) -> Frames | None:
        """Begins or ends, as a message says; the report, if a profile has ended."""
        if frames[0] == _BEGIN:
            return self._begin(ShardOrder(**msgpack.unpackb(frames[1])))
        return None if self._running is None else self._end(self._running)

    def run_step(self, step: Callable[[], None]) -> Frames | None:
        """Runs a step of the profile; the report, if it was the last one."""
        running = self._running
        assert running is not None, "a step of no profile"
        with running.profiler.step():
            step()
        is_over = running.profiler.num_steps >= running.order.num_steps
        return self._end(running) if is_over else None

    def _begin(self, order: ShardOrder) -> Frames | None:
        """Whatever goes wrong is reported, and no step notices."""
        try:
            Path(order.directory).mkdir(mode=0o700, parents=True, exist_ok=True)
            self._running = _Running(order, StepProfiler(self._runner))
        except Exception as error:
            return self._failed(order, error, 0)
        return None

    def _end(self, running: _Running) -> Frames:
        self._running = None
        order, num_steps = running.order, running.profiler.num_steps
        name = f"{order.worker.replace(' ', '-')}-rank-{self._rank}.json.gz"
        path = Path(order.directory) / name
        try:
            saved = running.profiler.save(path, order.max_bytes)
        except Exception as error:
            return self._failed(order, error, num_steps)
        is_there = saved.size_bytes > 0
        return order.report(
            WorkerProfile(
                order.worker,
                self._rank,
                num_steps,
                trace_path=str(path) if is_there else "",
                trace_bytes=saved.size_bytes,
                operations=saved.operations,
                fault="" if is_there else f"the trace is larger than {order.max_bytes} bytes",
            )
        )

    def _failed(self, order: ShardOrder, error: Exception, num_steps: int) -> Frames:
        logger.error("no profile could be taken", exc_info=error)
        fault = f"{type(error).__name__}: {error}"
        return order.report(WorkerProfile(order.worker, self._rank, num_steps, fault=fault))


def is_about_profiles(frames: Frames) -> bool:
    """Whether a message is for ShardProfiling, and no step."""
    return frames[0] == _BEGIN or frames == END


def is_report(frames: Frames) -> bool:
    """Whether a message is for a ProfileInbox, and no answer to a step."""
    return frames[0] == _REPORT


class ProfileInbox:
    """The reports of a group's ranks, as they come between the answers to steps."""

    def __init__(self, order: ShardOrder, size: int) -> None:
        """size: how many ranks there are."""
        self._directory = order.directory
        self._size = size
        self._reports: dict[int, WorkerProfile] = {}

    def take(self, frames: Frames) -> None:
        """Keeps a report, unless it is of an earlier order, which was given up on."""
        _, of_directory, packed = frames
        if of_directory.decode() == self._directory:
            report = _decode_report(packed)
            self._reports[report.rank] = report

    @property
    def reports(self) -> tuple[WorkerProfile, ...] | None:
        """Those of all ranks, by rank; None until all have come."""
        if len(self._reports) < self._size:
            return None
        return tuple(report for _, report in sorted(self._reports.items()))


def _decode_report(packed: bytes) -> WorkerProfile:
    values: dict[str, Any] = msgpack.unpackb(packed)
    operations = tuple(OperationTime(**each) for each in values.pop("operations"))
    return WorkerProfile(**values, operations=operations)
