"""The shards of the target model, as the engine's target."""

from __future__ import annotations

from collections import deque

from ray.util.placement_group import PlacementGroup

from cluster.workers import serialization
from cluster.workers.actor import TargetShard
from cluster.workers.worker_group import GroupSpec, ShardGroup
from specdec.types.errors import TargetFailedError
from specdec.types.messages import StepInput, VerifyOutput

_NOTHING = StepInput(-1, (), (), (), ())


class TargetGroup(ShardGroup):
    """Fans steps out to every rank, and collects rank 0's answer. Raises TargetFailedError."""

    def __init__(self, spec: GroupSpec, placement: PlacementGroup | None) -> None:
        """Returns when every rank is warm; leaves nothing behind when one is not."""
        first_step = serialization.encode_step(_NOTHING)
        super().__init__(spec, placement, TargetShard, TargetFailedError, first_step)
        self._step_ids: deque[int] = deque()  # of those that were not collected

    def begin(self, step: StepInput) -> None:
        """Sends a step to every rank."""
        self._step_ids.append(step.step_id)
        self.send(serialization.encode_step(step))

    def collect(self) -> VerifyOutput:
        """Waits for rank 0's answer to the first step that was begun and not collected."""
        step_id, output = self._step_ids.popleft(), serialization.decode_output(self.receive())
        assert output.step_id == step_id, "an answer to another step"
        return output
