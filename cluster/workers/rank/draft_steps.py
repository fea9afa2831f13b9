"""Steps of a draft model's rank: from the frames of a message to those of its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from cluster.workers.messages import draft_serialization, serialization
from cluster.workers.messages.frames import Frames
from cluster.workers.messages.load_messages import ADAPTERS
from cluster.workers.rank.adapter_orders import execute_adapter_order
from cluster.workers.rank.draft_partition import DraftPartition
from specdec.worker import DraftModelRunner, RankComparison


class DraftSteps:
    """Executes draft steps in order, those of one Router.

    partition: None where no other Router uses the worker. share: part of the device's time that the
    Router may use.
    """

    def __init__(
        self,
        runner: DraftModelRunner,
        rank: int,
        partition: DraftPartition | None = None,
        share: Callable[[], float] = lambda: 1.0,
        comparison: RankComparison | None = None,
    ) -> None:
        """comparison: of the drafts of all ranks, before each answer; None without."""
        self._runner = runner
        self._rank = rank
        self._partition = partition
        self._share = share
        self._comparison = comparison

    def __call__(self, frames: Frames, is_interrupted: Callable[[], bool]) -> Iterator[Frames]:
        """Execute a step, or an order for adapters, and yield its answers.

        `is_interrupted` ends drafts ahead early.
        """
        if ADAPTERS.is_order(frames):
            yield from execute_adapter_order(self._runner, self._rank, frames)
            return
        step, partition = draft_serialization.decode_draft_step(frames), self._partition
        if partition is not None:
            step = partition.to_worker(step)
        drafts = self._runner.draft(step)
        if self._comparison is not None:
            self._comparison.check_drafts(step, drafts)
        if step.drafts:
            own = drafts if partition is None else partition.to_router(drafts)
            yield draft_serialization.encode_draft_output(own)
        if step.rows:
            self._runner.catch_up(step)
        if step.rows or not (step.drafts or step.ahead):
            yield serialization.CAUGHT_UP
        if step.ahead:
            ahead = self._runner.draft_ahead(step, is_interrupted)
            if self._comparison is not None:
                self._comparison.check_ahead(step, ahead)
            ahead = replace(ahead, share=self._share())
            yield draft_serialization.encode_ahead_output(
                ahead if partition is None else partition.to_router(ahead)
            )
