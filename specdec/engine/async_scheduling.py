"""The step behind the one in flight, made before the tokens of that one are known.

A worker that has its next step at hand need not wait between two steps for the engine to commit the
one and make the other (asynchronous scheduling, as vLLM and SGLang have it). Of a batch that only
decodes, and for which nothing is drafted, all is known beforehand but the tokens themselves, and
those the worker has. Where a token then ends its sequence, that sequence's row was run in vain.
"""

from __future__ import annotations

import collections.abc

from specdec.sequences.block_manager import BlockManager
from specdec.sequences.sequence import Sequence, SequenceStatus
from specdec.types.messages import PENDING_TOKEN, StepRow


def rows_ahead(
    in_flight: collections.abc.Sequence[tuple[Sequence, StepRow]],
    blocks: BlockManager,
    max_model_len: int,
) -> list[tuple[Sequence, StepRow]]:
    """What goes on behind the rows in flight, its blocks reserved; none where that is not certain.

    Left out are sequences that have ended by abort, or are known to end with the token to come.
    """
    if not all(_is_foreseen(seq, row) for seq, row in in_flight):
        return []
    going_on = [seq for seq, _ in in_flight if _goes_on(seq, max_model_len)]
    # The token to come is behind those that are known, and its KV goes there.
    if not all(blocks.reserve(seq.seq_id, seq.num_tokens + 1) for seq in going_on):
        return []
    return [
        (seq, StepRow(seq.seq_id, seq.num_tokens, (PENDING_TOKEN,), 0, samples=True))
        for seq in going_on
    ]


def _is_foreseen(seq: Sequence, row: StepRow) -> bool:
    """Whether the row yields one token, and the next row has nothing else to wait for."""
    return row.samples and not row.guesses and seq.constraint is None


def _goes_on(seq: Sequence, max_model_len: int) -> bool:
    num_output_tokens = seq.num_output_tokens + 1
    return (
        seq.status is SequenceStatus.RUNNING
        and seq.num_tokens + 1 < max_model_len
        and (seq.max_tokens is None or num_output_tokens < seq.max_tokens)
    )
