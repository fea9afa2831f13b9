"""State of the KV of a draft head on one rank: which pairs are computed, and their features.

The KV of a head is one more layer in the target's block tables (`heads.networks.base`). It is
computed lazily: while speculation is off only its inputs are kept. So each sequence has a number of
computed pairs, and each block the number of its leading slots with valid KV. The latter outlives
the sequence, for those that share the block through the prefix cache. All ranks receive the same
messages, so they agree.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specdec.kernels.reference.forward_batch import (
    Chunk,
    ForwardBatch,
    adapter_runs,
    slots_of,
)
from specdec.types.messages import BASE_MODEL, StepInput, StepRow
from specdec.worker.batch.batch_state import BatchState
from specdec.worker.head.features import HeadFeatures


@dataclass
class _Progress:
    """A sequence on the head.

    token_ids: all that are known. adapter_id: as in StepRow. num_computed: slots before it have
    their pair's KV, from the first that has a pair on; None until the first row gives the number of
    cached tokens.
    blocks_end: slot after the blocks that it has written; in those, slots that no pair was computed
    for are known to have no KV.
    """

    token_ids: list[int]
    adapter_id: int = BASE_MODEL
    num_computed: int | None = None
    blocks_end: int = 0

    def is_continued_by(self, row: StepRow) -> bool:
        """Return whether a row runs the last known token alone, in a block that was written."""
        start, token_ids = row.num_computed_tokens, row.token_ids
        return (
            len(token_ids) == 1
            and row.samples
            and start < self.blocks_end
            and len(self.token_ids) == start + 1
            and self.token_ids[start] == token_ids[0]
        )

    def follow(self, row: StepRow) -> None:
        """Set the tokens from a row's start on; pairs of tokens that change are not computed."""
        start, known = row.num_computed_tokens, row.known
        end = start + len(known)
        if tuple(self.token_ids[start:end]) != known:
            self.token_ids[start:end] = known
            self.cut(start)
        if row.samples and len(self.token_ids) > end:
            del self.token_ids[end:]
            self.cut(end)

    def cut(self, num_tokens: int) -> None:
        """Forget the pairs from slot `num_tokens` on, and the blocks."""
        self.blocks_end = 0
        if self.num_computed is not None:
            self.num_computed = min(self.num_computed, num_tokens)


class HeadKv:
    """Features of all slots, and the progress of the head's KV in sequences and blocks."""

    def __init__(
        self,
        batch_state: BatchState,
        num_blocks: int,
        block_size: int,
        features: HeadFeatures,
        first_slot: int,
    ) -> None:
        """features: of `num_blocks` blocks. first_slot: as in `networks.base`."""
        self._batch_state = batch_state
        self._block_size = block_size
        self.features = features
        self._first_slot = first_slot
        self._num_filled = array("i", bytes(4 * num_blocks))  # by block
        self._sequences: dict[int, _Progress] = {}

    def update(self, step: StepInput) -> None:
        """Apply the releases, admissions and block table deltas of a step."""
        for seq_id in step.released:
            del self._sequences[seq_id]
        for admission in step.admitted:
            self._sequences[admission.seq_id] = _Progress(list(admission.token_ids))
        for delta in step.block_table_deltas:
            self._sequences[delta.seq_id].cut(delta.start * self._block_size)

    def store(self, rows: Sequence[StepRow], batch: ForwardBatch, states: Tensor) -> None:
        """Add a pass over `rows` to the features, and note what it overwrites."""
        self.features.add(batch, states)
        for row in rows:
            self._note(row)

    def has_pairs_before(self, row: StepRow) -> bool:
        """Return whether all pairs before a row's first token are computed, and are its."""
        progress, start, end = self._sequences[row.seq_id], row.num_computed_tokens, row.known_end
        num_computed = progress.num_computed
        if num_computed is None:
            num_computed = self._num_shared(self._batch_state.block_table(row.seq_id), start)
        return (
            (len(progress.token_ids) == end or not row.samples)
            and tuple(progress.token_ids[start:end]) == row.known
            and start <= max(self._first_slot, num_computed)
        )

    def note_step(self, row: StepRow, token_ids: Sequence[int]) -> None:
        """Record that a step on the device ran a row, which yielded `token_ids`.

        It has stored their features, and the KV of their pairs where the head has run them: of a
        row that does not sample, those of its tokens.
        """
        self._note(row)
        self.append_output(row.seq_id, token_ids)
        if row.drafting.num_next and (token_ids or not row.samples):
            end = self.pairs_end(row)
            num_missing = self.num_missing(row.seq_id, end)
            self.note_computed(row.seq_id, self.pairs(row.seq_id, num_missing))

    def append_output(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """Append verified tokens, whose features are stored except for the last one's."""
        self._sequences[seq_id].token_ids.extend(token_ids)

    def num_tokens(self, seq_id: int) -> int:
        """Return the number of known tokens of a sequence."""
        return len(self._sequences[seq_id].token_ids)

    def pairs_end(self, row: StepRow) -> int:
        """Return the slot after the last pair that can be computed after a row that has run.

        A row of a sequence that has ended at the longest length, whose result is discarded, yields
        a token that has no slot.
        """
        if not row.samples:
            return row.end
        num_slots = len(self._batch_state.block_table(row.seq_id)) * self._block_size
        return min(self.num_tokens(row.seq_id), num_slots)

    def num_missing(self, seq_id: int, end: int) -> int:
        """Return the number of pairs below slot `end` that are not computed."""
        return end - self._first_missing(seq_id)

    def pairs(self, seq_id: int, count: int) -> Chunk:
        """Return the first `count` missing pairs of a sequence."""
        start = self._first_missing(seq_id)
        progress, table = self._sequences[seq_id], self._batch_state.block_table(seq_id)
        token_ids = progress.token_ids[start : start + count]
        return Chunk(token_ids, start, table, adapter_id=progress.adapter_id)

    def features_of(self, chunks: Sequence[Chunk]) -> Tensor:
        """Return the features [T, feature_size] that belong to pairs: of the tokens before them."""
        if not self._first_slot:
            return self.features.read(())
        slots = [slot for each in chunks for slot in self._slots_before(each)]
        runs = adapter_runs((each.adapter_id, len(each.token_ids)) for each in chunks)
        return self.features.read(slots, runs)

    def note_computed(self, seq_id: int, pairs: Chunk) -> None:
        """Record that the KV of `pairs` is written."""
        self._sequences[seq_id].num_computed = pairs.end
        start = 0 if pairs.start == self._first_slot else pairs.start  # no pair is before it
        for index in range(start // self._block_size, -(-pairs.end // self._block_size)):
            first, block = index * self._block_size, pairs.block_table[index]
            num_filled = self._num_filled[block]
            if num_filled >= start - first:
                num_now = min(pairs.end - first, self._block_size)
                self._num_filled[block] = max(num_filled, num_now)

    def _first_missing(self, seq_id: int) -> int:
        num_computed = self._sequences[seq_id].num_computed
        assert num_computed is not None, "no row of the sequence has run"
        return max(self._first_slot, num_computed)

    def _slots_before(self, chunk: Chunk) -> list[int]:
        return slots_of(chunk.block_table, range(chunk.start - 1, chunk.end - 1), self._block_size)

    def _note(self, row: StepRow) -> None:
        """Note what the target's pass over a row overwrites."""
        progress = self._sequences[row.seq_id]
        if not progress.is_continued_by(row):  # as most rows do, which then change nothing
            self._note_write(row, progress)

    def _note_write(self, row: StepRow, progress: _Progress) -> None:
        """Record that the target writes a row's slots: pairs that were there before are gone."""
        table = self._batch_state.block_table(row.seq_id)
        if progress.num_computed is None:
            progress.num_computed = self._num_shared(table, row.num_computed_tokens)
        progress.adapter_id = row.adapter_id
        progress.follow(row)
        first = max(row.num_computed_tokens, progress.num_computed)
        for index in range(first // self._block_size, -(-row.end // self._block_size)):
            offset = max(0, first - index * self._block_size)
            self._num_filled[table[index]] = min(self._num_filled[table[index]], offset)
        progress.blocks_end = -(-row.end // self._block_size) * self._block_size

    def _num_shared(self, table: array[int], num_cached: int) -> int:
        """Return the leading tokens of a cached prefix whose pairs another sequence computed."""
        for index in range(num_cached // self._block_size):
            if self._num_filled[table[index]] < self._block_size:
                return index * self._block_size + self._num_filled[table[index]]
        return num_cached - num_cached % self._block_size
