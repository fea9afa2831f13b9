"""The shards of the draft model, as the worker of its proposer."""

from __future__ import annotations

from ray.util.placement_group import PlacementGroup

from cluster import wire
from cluster.shard import DraftShard
from cluster.shard_group import GroupSpec, ShardGroup
from specdec.errors import DraftFailedError
from specdec.step import DraftOutput, DraftStep

_NOTHING = DraftStep(-1, (), (), (), (), ())


class DraftGroup(ShardGroup):
    """Sends draft steps to every rank, and collects rank 0's drafts. Raises DraftFailedError."""

    def __init__(self, spec: GroupSpec, placement: PlacementGroup | None) -> None:
        """Returns when every rank is warm; leaves nothing behind when one is not."""
        first_step = wire.encode_draft_step(_NOTHING)
        super().__init__(spec, placement, DraftShard, DraftFailedError, first_step)
        self._num_catching_up = 0

    def begin(self, step: DraftStep) -> None:
        """Sends a step to every rank."""
        if step.rows or not step.drafts:
            self._num_catching_up += 1
        self.send(wire.encode_draft_step(step))

    def collect(self) -> DraftOutput:
        """Waits for the drafts of the step begun last."""
        while (frames := self.receive()) == wire.CAUGHT_UP:
            self._num_catching_up -= 1
        return wire.decode_draft_output(frames)

    @property
    def is_busy(self) -> bool:
        """Whether chunks of an earlier step are not known to have been run."""
        while self._num_catching_up and self.has_answer:
            answer = self.receive()
            assert answer == wire.CAUGHT_UP, "drafts that nobody waits for"
            self._num_catching_up -= 1
        return self._num_catching_up > 0
