"""A Router's part of a draft worker that several Routers share: KV blocks and sequence ids.

Each Router numbers its sequences and blocks from 0, as if the worker were its own. On the worker
both are mapped to ranges that no other Router has.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeVar

from specdec.types.draft_messages import AheadOutput, DraftOutput, DraftStep
from specdec.types.messages import BlockTableDelta, SequenceAdmission

OutputT = TypeVar("OutputT", DraftOutput, AheadOutput)

_NO_STEP = -1


@dataclass
class DraftPartition:
    """Partition `index` of `count`, with `num_blocks` blocks of the worker's pool."""

    index: int
    count: int
    num_blocks: int
    _admitted: set[int] = field(default_factory=set)  # sequences of the Router on the worker

    def to_worker(self, step: DraftStep) -> DraftStep:
        """Return a step of the Router with the worker's sequence ids and blocks.

        Raises ValueError for a block outside of the partition: it would be another Router's.
        """
        self._admitted.difference_update(step.released)
        self._admitted.update(each.seq_id for each in step.admitted)
        return replace(
            step,
            released=tuple(map(self._seq_id, step.released)),
            admitted=tuple(map(self._admission, step.admitted)),
            block_table_deltas=tuple(map(self._delta, step.block_table_deltas)),
            rows=tuple(row._replace(seq_id=self._seq_id(row.seq_id)) for row in step.rows),
            drafts=tuple(row._replace(seq_id=self._seq_id(row.seq_id)) for row in step.drafts),
            ahead=tuple(row._replace(seq_id=self._seq_id(row.seq_id)) for row in step.ahead),
        )

    def to_router(self, output: OutputT) -> OutputT:
        """Return drafts with the Router's sequence ids."""
        rows = tuple(row._replace(seq_id=row.seq_id // self.count) for row in output.rows)
        return replace(output, rows=rows)

    def release_all(self) -> DraftStep:
        """Return a step that releases all sequences of the Router, for the next one."""
        released, self._admitted = tuple(map(self._seq_id, sorted(self._admitted))), set()
        return DraftStep(_NO_STEP, released, (), (), (), ())

    def _seq_id(self, seq_id: int) -> int:
        return seq_id * self.count + self.index

    def _admission(self, each: SequenceAdmission) -> SequenceAdmission:
        return replace(each, seq_id=self._seq_id(each.seq_id))

    def _delta(self, delta: BlockTableDelta) -> BlockTableDelta:
        own = range(self.num_blocks)
        if any(block not in own for block in delta.block_ids):
            raise ValueError(f"a block outside of the {self.num_blocks} of the Router's partition")
        first = self.index * self.num_blocks
        blocks = tuple(first + block for block in delta.block_ids)
        return BlockTableDelta(self._seq_id(delta.seq_id), delta.start, blocks)
