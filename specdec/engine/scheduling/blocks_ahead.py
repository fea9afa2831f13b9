"""Blocks of running sequences that are in their state after the step in flight."""

from __future__ import annotations

import collections.abc
from collections.abc import Set

from specdec.sequences.block_manager import BlockKey, BlockManager
from specdec.sequences.sequence import Sequence


def have_blocks(
    running: collections.abc.Iterable[Sequence], blocks: BlockManager, max_num_batched_tokens: int
) -> bool:
    """Return whether the free blocks may suffice for the next tokens of the sequences."""
    num_missing = 0
    for seq in running:
        if seq.num_computed_tokens % blocks.block_size and seq.is_decoding:
            continue  # its last block has room
        chunk = min(seq.num_uncomputed_tokens, max_num_batched_tokens)
        num_needed = -(-(seq.num_computed_tokens + chunk) // blocks.block_size)
        num_held = len(blocks.block_table(seq.seq_id))
        num_missing += max(0, num_needed - num_held)
    return num_missing <= blocks.num_free_blocks


def completed_keys(
    running: collections.abc.Iterable[Sequence], blocks: BlockManager
) -> frozenset[BlockKey]:
    """Return the keys of the blocks that the step in flight completes, accepted drafts aside."""
    return frozenset(
        key
        for seq in running
        for key in blocks.unpublished_keys(
            seq.seq_id, seq.token_ids, min(seq.num_computed_tokens, len(seq.token_ids))
        )
    )


def lacks_block(seq: Sequence, blocks: BlockManager, completed: Set[BlockKey]) -> bool:
    """Return whether the first block that a waiting sequence does not find cached is completed."""
    if not completed or seq.prompt_report is not None:  # it computes its whole prompt
        return False
    return blocks.missing_key(seq.token_ids, seq.block_keys) in completed
