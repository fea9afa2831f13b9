"""The shards of the target model, as the engine's target."""

from __future__ import annotations

from ray.util.placement_group import PlacementGroup

from cluster import wire
from cluster.shard_group import GroupSpec, ShardGroup
from specdec.step import StepInput, VerifyOutput

_NOTHING = StepInput(-1, (), (), (), ())


class TargetGroup:
    """Fans steps out to every rank, and collects rank 0's answer. Raises TargetFailedError."""

    def __init__(self, spec: GroupSpec, placement: PlacementGroup | None) -> None:
        """Returns when every rank is warm; leaves nothing behind when one is not."""
        self._shards = ShardGroup(spec, placement)
        self._step_id = -1
        try:
            self._shards.wait_until_warm(wire.encode_step(_NOTHING))
        except BaseException:
            self._shards.kill()
            raise

    def begin(self, step: StepInput) -> None:
        """Sends a step to every rank."""
        self._step_id = step.step_id
        self._shards.send(wire.encode_step(step))

    def collect(self) -> VerifyOutput:
        """Waits for rank 0's answer."""
        output = wire.decode_output(self._shards.receive())
        assert output.step_id == self._step_id, "an answer to another step"
        return output

    def check_alive(self) -> None:
        """Raises TargetFailedError if a rank has ended. May be called from any thread."""
        self._shards.check_alive()

    def close(self) -> None:
        """Ends every rank, in peace."""
        self._shards.close()

    def kill(self) -> None:
        """Ends every rank at once."""
        self._shards.kill()
