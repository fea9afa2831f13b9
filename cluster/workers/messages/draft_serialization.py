"""Serialization of a draft model's steps and answers; see `workers.messages.serialization`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import msgpack

from cluster.workers.messages.frames import (
    Frames,
    pack_numbers,
    pack_table,
    unpack_numbers,
    unpack_table,
)
from cluster.workers.messages.row_serialization import (
    decode_draft_probs,
    listed_width,
    pack_draft_probs,
)
from cluster.workers.messages.serialization import (
    decode_step,
    encode_step,
)
from specdec.types.draft_messages import (
    AheadDraft,
    AheadOutput,
    AheadRow,
    Continuation,
    DraftedRow,
    DraftOutput,
    DraftPass,
    DraftRow,
    DraftStep,
)

_AHEAD = b"ahead"


def encode_draft_step(step: DraftStep) -> Frames:
    """Encode as drafts [N, 6], their initial tokens, and the frames of `encode_step`.

    Between them are the rows to draft ahead for, [A, 7], and for each its tokens and its fan-out.
    """
    drafts = (
        (
            row.seq_id,
            row.num_computed_tokens,
            len(row.token_ids),
            row.num_draft_tokens,
            row.first_index,
            row.adapter_id,
        )
        for row in step.drafts
    )
    ahead = (
        (
            row.seq_id,
            row.num_computed_tokens,
            len(row.token_ids),
            row.num_drafts,
            row.num_draft_tokens,
            row.first_index,
            row.adapter_id,
        )
        for row in step.ahead
    )
    return [
        pack_table(drafts),
        pack_numbers(token for row in step.drafts for token in row.token_ids),
        pack_table(ahead),
        pack_numbers(number for row in step.ahead for number in (*row.token_ids, *row.fan_out)),
        *encode_step(step),
    ]


def decode_draft_step(frames: Sequence[bytes]) -> DraftStep:
    """Decode the frames of `encode_draft_step`."""
    draft_rows, tokens, ahead_rows, ahead_numbers, *common = frames
    step, table = decode_step(common), unpack_table(draft_rows, 6)
    row_tokens = unpack_numbers(tokens, [draft[2] for draft in table])
    drafts = tuple(
        DraftRow(seq_id, computed, token_ids, count, first_index, adapter_id)
        for (seq_id, computed, _, count, first_index, adapter_id), token_ids in zip(
            table, row_tokens, strict=True
        )
    )
    ahead = tuple(_decode_ahead(ahead_rows, ahead_numbers))
    return DraftStep(**vars(step), drafts=drafts, ahead=ahead)


def has_drafts(frames: Sequence[bytes]) -> bool:
    """Return whether the frames of `encode_draft_step` have drafts, which a step waits for."""
    return len(frames[0]) > 0


def _decode_ahead(rows: bytes, numbers: bytes) -> Iterator[AheadRow]:
    table = unpack_table(rows, 7)
    row_numbers = unpack_numbers(numbers, [row[2] + 1 + row[3] for row in table])
    for row, own in zip(table, row_numbers, strict=True):
        seq_id, computed, count, num_drafts, *rest = row
        yield AheadRow(seq_id, computed, own[:count], num_drafts, own[count:], *rest)


def encode_draft_output(output: DraftOutput) -> Frames:
    """Encode as [header, rows [B, 3], tokens, 2 draft_probs arrays]."""
    rows = ((row.seq_id, len(row.token_ids), listed_width(row.draft_probs)) for row in output.rows)
    return [
        msgpack.packb(output.step_id),
        pack_table(rows),
        pack_numbers(token for row in output.rows for token in row.token_ids),
        *pack_draft_probs(row.draft_probs for row in output.rows),
    ]


def decode_draft_output(frames: Sequence[bytes]) -> DraftOutput:
    """Decode the frames of `encode_draft_output`."""
    header, rows, tokens, listed, probs = frames
    table = unpack_table(rows, 3)
    row_tokens = unpack_numbers(tokens, [count for _, count, _ in table])
    row_probs = decode_draft_probs(((count, width) for _, count, width in table), listed, probs)
    return DraftOutput(
        msgpack.unpackb(header),
        tuple(
            DraftedRow(seq_id, token_ids, draft_probs)
            for (seq_id, _, _), token_ids, draft_probs in zip(
                table, row_tokens, row_probs, strict=True
            )
        ),
    )


def encode_ahead_output(output: AheadOutput) -> Frames:
    """Encode as [tag, header, rows [B, 2], outcomes [C, 4], tokens, 2 draft_probs arrays].

    The tokens of an outcome are the one that the target adds, then its draft.
    """
    drafts = [each for row in output.rows for each in row.continuations]
    outcomes = (
        (
            each.num_accepted,
            each.token_id,
            len(each.draft_token_ids),
            listed_width(each.draft_probs),
        )
        for each in drafts
    )
    return [
        _AHEAD,
        msgpack.packb([output.step_id, output.passes, output.is_whole, output.share]),
        pack_table((row.seq_id, len(row.continuations)) for row in output.rows),
        pack_table(outcomes),
        pack_numbers(token for each in drafts for token in each.draft_token_ids),
        *pack_draft_probs(each.draft_probs for each in drafts),
    ]


def is_ahead_output(frames: Sequence[bytes]) -> bool:
    """Return whether an answer has the frames of `encode_ahead_output`."""
    return frames[0] == _AHEAD


def decode_ahead_output(frames: Sequence[bytes]) -> AheadOutput:
    """Decode the frames of `encode_ahead_output`."""
    _, header, rows, outcomes, tokens, listed, probs = frames
    step_id, passes, is_whole, share = msgpack.unpackb(header, use_list=False)
    table = unpack_table(outcomes, 4)
    token_ids = unpack_numbers(tokens, [count for _, _, count, _ in table])
    widths = ((count, width) for _, _, count, width in table)
    row_probs = decode_draft_probs(widths, listed, probs)
    continuations = (
        Continuation(num_accepted, token_id, drafted, draft_probs)
        for (num_accepted, token_id, _, _), drafted, draft_probs in zip(
            table, token_ids, row_probs, strict=True
        )
    )
    return AheadOutput(
        step_id,
        tuple(
            AheadDraft(seq_id, tuple(islice(continuations, count)))
            for seq_id, count in unpack_table(rows, 2)
        ),
        tuple(DraftPass(*each) for each in passes),
        is_whole,
        share,
    )
