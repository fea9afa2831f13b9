"""Asynchronous scheduling: the rows of the next step before the tokens of this one are known.

As in vLLM and SGLang, a worker that already has its next step does not wait while the engine
commits this one. In a batch that only decodes, without drafts, everything about the next step is
known except the tokens, and those the worker has. If a token ends its sequence, the result of that
sequence's next row is discarded.
"""

from __future__ import annotations

import collections.abc

from specdec.sequences.block_manager import BlockManager
from specdec.sequences.sequence import Sequence, SequenceStatus
from specdec.types.messages import PENDING_TOKEN, StepRow


def next_rows(
    in_flight: collections.abc.Sequence[tuple[Sequence, StepRow]],
    blocks: BlockManager,
    max_model_len: int,
) -> list[tuple[Sequence, StepRow]]:
    """Return the rows that follow those in flight, with blocks reserved; none if one is unknown.

    Leaves out sequences that were aborted or that certainly end with the pending token.
    """
    if not all(_is_predictable(seq, row) for seq, row in in_flight):
        return []
    continuing = [seq for seq, _ in in_flight if _continues(seq, max_model_len)]
    # The pending token follows the known ones, and its KV needs a slot.
    if not all(blocks.reserve(seq.seq_id, seq.num_tokens + 1) for seq in continuing):
        return []
    return [(seq, _pending_row(seq)) for seq in continuing]


def _pending_row(seq: Sequence) -> StepRow:
    adapter_id = seq.request.adapter_id
    return StepRow(seq.seq_id, seq.num_tokens, (PENDING_TOKEN,), 0, True, adapter_id=adapter_id)


def _is_predictable(seq: Sequence, row: StepRow) -> bool:
    """Return whether the row yields one token and the next row depends on nothing else."""
    return row.samples and not row.guesses and seq.constraint is None


def _continues(seq: Sequence, max_model_len: int) -> bool:
    num_output_tokens = seq.num_output_tokens + 1
    return (
        seq.status is SequenceStatus.RUNNING
        and seq.num_tokens + 1 < max_model_len
        and (seq.max_tokens is None or num_output_tokens < seq.max_tokens)
    )
