"""Steps and orders of one rank of a target, as messages.

Where a device runs the steps, the next one is begun after the one in flight as soon as its message
has arrived, so that the device does not wait for the exchange of results and schedules.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cluster.workers.group_spec import ModelSource
from cluster.workers.messages import serialization
from cluster.workers.messages.frames import Frames
from cluster.workers.messages.load_messages import ADAPTERS, HEADS
from cluster.workers.rank.adapter_orders import execute_adapter_order
from specdec.types.drafters import HeadFile
from specdec.types.messages import StepInput, StepRow, VerifyOutput
from specdec.worker import RankComparison, TargetModelRunner

_POLL_S = 50e-6


class TargetSteps:
    """Executes the messages of a target in order; each step has one answer."""

    def __init__(
        self,
        runner: TargetModelRunner,
        rank: int,
        sleep: Callable[[float], None] = time.sleep,
        comparison: RankComparison | None = None,
    ) -> None:
        """sleep: waits some seconds for a message, or for the device.

        comparison: of the answers of all ranks, before each; None without.
        """
        self._runner, self._rank, self._sleep = runner, rank, sleep
        self._comparison = comparison
        self._rows: Sequence[StepRow] = ()  # of the last step

    def __call__(self, frames: Frames, has_message: Callable[[], bool]) -> Iterator[Frames]:
        """Execute a step, or an order for the versions of the draft head or for adapters.

        has_message: whether another message has arrived, after which answers may be yielded.
        """
        if HEADS.is_order(frames):
            yield from self.finish()
            yield from self._change_head(frames)
        elif ADAPTERS.is_order(frames):
            yield from self.finish()
            yield from execute_adapter_order(self._runner, self._rank, frames)
        else:
            step = serialization.decode_step(frames, self._rows)
            self._rows = step.rows
            yield from self._step(step, has_message)

    def finish(self) -> Iterator[Frames]:
        """Wait for the steps in flight; yield their answers."""
        while self._runner.num_in_flight:
            yield self._answer(self._runner.collect())
        self._runner.settle()

    def _answer(self, output: VerifyOutput) -> Frames:
        if self._comparison is not None:
            self._comparison.check(output)
        return serialization.encode_output(output)

    def _step(self, step: StepInput, has_message: Callable[[], bool]) -> Iterator[Frames]:
        if self._comparison is not None:
            self._comparison.note(step)
        if self._runner.needs_results(step):
            yield from self.finish()
        if not self._runner.begin(step):
            yield from self.finish()
            yield self._answer(self._runner.execute(step))
            return
        while self._runner.num_in_flight:
            if self._runner.num_in_flight == 1 and has_message():
                return  # it may be a step to begin after this one
            if self._runner.num_in_flight > 1 or self._runner.is_step_done:
                yield self._answer(self._runner.collect())
            else:
                self._sleep(_POLL_S)

    def _change_head(self, frames: Frames) -> Iterator[Frames]:
        """Load a version of the draft head and report it, or draft with a loaded one."""
        versions = self._runner.head_versions
        assert versions is not None, "the target has no draft head"

        def load(head: HeadFile) -> str:
            source = ModelSource(head.name, Path(head.directory), may_be_pickled=True)
            return versions.load(head, source.here)

        yield from HEADS.execute(frames, self._rank, load, versions.switch)
