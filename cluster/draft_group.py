"""The shards of the draft model, as the worker of its proposer."""

from __future__ import annotations

from ray.util.placement_group import PlacementGroup

from cluster import wire
from cluster.shard_group import GroupSpec, ShardGroup
from specdec.step import DraftOutput, DraftStep

_NOTHING = DraftStep(-1, (), (), (), (), ())


class DraftGroup:
    """Sends draft steps to every rank, and collects rank 0's drafts. Raises DraftFailedError."""

    def __init__(self, spec: GroupSpec, placement: PlacementGroup | None) -> None:
        """Returns when every rank is warm; leaves nothing behind when one is not."""
        self._shards = ShardGroup(spec, placement)
        self._num_catching_up = 0
        try:
            self._shards.wait_until_warm(wire.encode_draft_step(_NOTHING))
        except BaseException:
            self._shards.kill()
            raise

    def begin(self, step: DraftStep) -> None:
        """Sends a step to every rank."""
        if step.rows or not step.drafts:
            self._num_catching_up += 1
        self._shards.send(wire.encode_draft_step(step))

    def collect(self) -> DraftOutput:
        """Waits for the drafts of the step begun last."""
        while (frames := self._shards.receive()) == wire.CAUGHT_UP:
            self._num_catching_up -= 1
        return wire.decode_draft_output(frames)

    @property
    def is_busy(self) -> bool:
        """Whether chunks of an earlier step are not known to have been run."""
        while self._num_catching_up and self._shards.has_answer:
            answer = self._shards.receive()
            assert answer == wire.CAUGHT_UP, "drafts that nobody waits for"
            self._num_catching_up -= 1
        return self._num_catching_up > 0

    def check_alive(self) -> None:
        """Raises DraftFailedError if a rank has ended. May be called from any thread."""
        self._shards.check_alive()

    def close(self) -> None:
        """Ends every rank, in peace."""
        self._shards.close()

    def kill(self) -> None:
        """Ends every rank at once."""
        self._shards.kill()
