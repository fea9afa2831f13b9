"""Tracks what a worker knows of its sequences, so that a step carries only the changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import NamedTuple

from specdec.sequences.block_manager import BlockManager
from specdec.sequences.sequence import Sequence
from specdec.types.messages import BlockTableDelta, SequenceAdmission


class StateDelta(NamedTuple):
    """The sequence lifecycle part of a step message, in the order of StepInput and DraftStep."""

    released: tuple[int, ...]
    admitted: tuple[SequenceAdmission, ...]
    block_table_deltas: tuple[BlockTableDelta, ...]


class WorkerView:
    """The sequences and blocks that one worker knows from the steps sent to it."""

    def __init__(
        self,
        blocks: BlockManager,
        admission: Callable[[Sequence], SequenceAdmission] = attrgetter("admission"),
    ) -> None:
        """admission: makes the message that introduces a sequence to the worker."""
        self._blocks = blocks
        self._admission = admission
        self._num_known_blocks: dict[int, int] = {}
        self._released: list[int] = []

    def update(self, sequences: Iterable[Sequence]) -> StateDelta:
        """Return what the worker lacks to run `sequences`, and record it as sent."""
        released, admitted, deltas = tuple(self._released), [], []
        self._released.clear()
        for seq in sequences:
            seq_id, table = seq.seq_id, self._blocks.block_table(seq.seq_id)
            num_known = self._num_known_blocks.get(seq_id)
            if num_known is None:
                admitted.append(self._admission(seq))
                num_known = self._num_known_blocks[seq_id] = 0
            if len(table) > num_known:  # tables change only at their end
                deltas.append(BlockTableDelta(seq_id, num_known, tuple(table[num_known:])))
                self._num_known_blocks[seq_id] = len(table)
        return StateDelta(released, tuple(admitted), tuple(deltas))

    def release(self, seq_id: int) -> None:
        """Have the worker drop a sequence with the next step; ignore one it does not know."""
        if self._num_known_blocks.pop(seq_id, None) is not None:
            self._released.append(seq_id)

    def truncate(self, seq_id: int) -> None:
        """Record that a sequence's block table has become shorter."""
        if seq_id in self._num_known_blocks:
            num_held = len(self._blocks.block_table(seq_id))
            self._num_known_blocks[seq_id] = min(self._num_known_blocks[seq_id], num_held)
