"""Snapshots that the ranks take after the rows of a step; see `StateSnapshots`."""

from __future__ import annotations

import collections.abc
from collections.abc import Iterator

from specdec.engine.scheduling.decode_run import RepeatedDecodes, Rows
from specdec.sequences.block_manager import BlockManager
from specdec.sequences.decode_rows import SampledTokens
from specdec.sequences.sequence import Sequence, SequenceStatus
from specdec.types.messages import SequenceAdmission, Snapshot, VerifyOutput

Save = tuple[Sequence, Snapshot]
"""A snapshot in the step that takes it, and the sequence whose states it has."""


def begin_saves(
    rows: Rows, admitted: collections.abc.Sequence[SequenceAdmission], blocks: BlockManager
) -> tuple[Save, ...]:
    """Return the snapshots to take after the rows of a step, which admits sequences, if any.

    Ranks resume what they admit before they take a snapshot, so that its slot may be used again.
    """
    if (snapshots := blocks.snapshots) is None:
        return ()
    found: list[Save] = []
    for each in admitted:
        snapshots.sent(each.seq_id)
    for seq, position in _ends(rows, blocks.block_size):
        slot = snapshots.begin_save(seq.seq_id, position)
        if slot is not None:
            found.append((seq, Snapshot(slot, position)))
    return tuple(found)


def _ends(rows: Rows, block_size: int) -> Iterator[tuple[Sequence, int]]:
    """Yield the sequences whose known tokens end at a block border after a step.

    The position of a row after one with drafts may be open; it is not the length then.
    """
    if isinstance(rows, RepeatedDecodes):
        yield from ((seq, len(seq.token_ids) + 1) for seq in rows.run.growing(rows.place + 1))
        rows = rows.others
    for seq, row in rows:
        end = row.known_end
        is_open = row.is_pending and row.num_computed_tokens != len(seq.token_ids)
        if end % block_size == 0 and not is_open:
            yield seq, end


def running(saves: tuple[Save, ...]) -> list[Save]:
    """Return the snapshots of a step whose sequences were not aborted while it ran."""
    return [save for save in saves if save[0].status is SequenceStatus.RUNNING]


def end_saves(
    saves: tuple[Save, ...],
    valid: collections.abc.Sequence[Save],
    verified: VerifyOutput,
    blocks: BlockManager,
) -> None:
    """Keep the snapshots that were `running` before the step was committed, unless logits are bad.

    A sequence that has ended since keeps its blocks, and the snapshot after them, in the cache.
    """
    bad = set[int]()
    if not isinstance(verified.rows, SampledTokens):
        bad = {row.seq_id for row in verified.rows if row.has_bad_logits}
    kept = {snapshot.slot for seq, snapshot in valid if seq.seq_id not in bad}
    for seq, (slot, position) in saves:
        place, keys = position // blocks.block_size, seq.block_keys
        key = keys[place] if slot in kept and place < len(keys) else None
        blocks.end_save(seq.seq_id, slot, key)
