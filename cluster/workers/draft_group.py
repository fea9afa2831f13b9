"""The shards of the draft model, as the worker of its proposer."""

from __future__ import annotations

from ray.util.placement_group import PlacementGroup

from cluster.workers import serialization
from cluster.workers.actor import DraftShard
from cluster.workers.worker_group import GroupSpec, ShardGroup
from specdec.types.errors import DraftFailedError
from specdec.types.messages import DraftOutput, DraftStep

_NOTHING = DraftStep(-1, (), (), (), (), ())


class DraftGroup(ShardGroup):
    """Sends draft steps to every rank, and collects rank 0's drafts. Raises DraftFailedError."""

    def __init__(self, spec: GroupSpec, placement: PlacementGroup | None) -> None:
        """Returns when every rank is warm; leaves nothing behind when one is not."""
        first_step = serialization.encode_draft_step(_NOTHING)
        super().__init__(spec, placement, DraftShard, DraftFailedError, first_step)
        self._num_catching_up = 0

    def begin(self, step: DraftStep) -> None:
        """Sends a step to every rank."""
        if step.rows or not step.drafts:
            self._num_catching_up += 1
        self.send(serialization.encode_draft_step(step))

    def collect(self) -> DraftOutput:
        """Waits for the drafts of the step begun last."""
        while (frames := self.receive()) == serialization.CAUGHT_UP:
            self._num_catching_up -= 1
        return serialization.decode_draft_output(frames)

    @property
    def is_busy(self) -> bool:
        """Whether chunks of an earlier step are not known to have been run."""
        while self._num_catching_up and self.has_answer:
            answer = self.receive()
            assert answer == serialization.CAUGHT_UP, "drafts that nobody waits for"
            self._num_catching_up -= 1
        return self._num_catching_up > 0
