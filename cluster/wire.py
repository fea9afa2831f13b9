"""Step messages on the wire: a msgpack header and raw little-endian int32 arrays, one frame each.

Nothing but numbers and short strings is ever decoded, so a message can't carry code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import msgpack
import numpy as np
from numpy.typing import NDArray

from specdec.step import (
    BlockTableDelta,
    DraftedRow,
    DraftOutput,
    DraftRow,
    DraftStep,
    SequenceAdmission,
    StepInput,
    StepRow,
    VerifiedRow,
    VerifyOutput,
)

Frames = list[bytes]
Int32Array = NDArray[np.int32]

STOP: Frames = [b"stop"]
CAUGHT_UP: Frames = [b"caught up"]
"""What a draft model answers, after its drafts, when it has run a step's chunks too."""

_ERROR = b"error"
_ROW_FIELDS = 5
_DELTA_FIELDS = 3
_DRAFT_FIELDS = 4


def encode_step(step: StepInput) -> Frames:
    """[header, rows [B, 5], tokens, block table deltas [D, 3], block ids]."""
    header = [
        step.step_id,
        list(step.released),
        [
            [a.seq_id, a.num_prompt_tokens, a.temperature, a.top_p, a.top_k, a.seed, a.choice]
            for a in step.admitted
        ],
    ]
    rows = [
        (row.seq_id, row.num_computed_tokens, len(row.token_ids), row.num_draft_tokens, row.samples)
        for row in step.rows
    ]
    deltas = [
        (delta.seq_id, delta.start, len(delta.block_ids)) for delta in step.block_table_deltas
    ]
    return [
        msgpack.packb(header),
        _pack(value for row in rows for value in row),
        _pack(token for row in step.rows for token in row.token_ids),
        _pack(value for delta in deltas for value in delta),
        _pack(block for delta in step.block_table_deltas for block in delta.block_ids),
    ]


def decode_step(frames: Sequence[bytes]) -> StepInput:
    """The inverse of `encode_step`."""
    header, rows, tokens, deltas, blocks = frames
    step_id, released, admitted = msgpack.unpackb(header)
    row_table = _unpack(rows).reshape(-1, _ROW_FIELDS).tolist()
    delta_table = _unpack(deltas).reshape(-1, _DELTA_FIELDS).tolist()
    row_tokens = _split(_unpack(tokens), [row[2] for row in row_table])
    delta_blocks = _split(_unpack(blocks), [delta[2] for delta in delta_table])
    return StepInput(
        step_id=step_id,
        released=tuple(released),
        admitted=tuple(SequenceAdmission(*fields) for fields in admitted),
        block_table_deltas=tuple(
            BlockTableDelta(seq_id, start, block_ids)
            for (seq_id, start, _), block_ids in zip(delta_table, delta_blocks, strict=True)
        ),
        rows=tuple(
            StepRow(seq_id, computed, token_ids, drafts, bool(samples))
            for (seq_id, computed, _, drafts, samples), token_ids in zip(
                row_table, row_tokens, strict=True
            )
        ),
    )


def encode_draft_step(step: DraftStep) -> Frames:
    """The frames of `encode_step`, then drafts [N, 4] and the tokens that they begin with."""
    drafts = [
        (row.seq_id, row.num_computed_tokens, len(row.token_ids), row.num_draft_tokens)
        for row in step.drafts
    ]
    return [
        *encode_step(step),
        _pack(value for draft in drafts for value in draft),
        _pack(token for row in step.drafts for token in row.token_ids),
    ]


def decode_draft_step(frames: Sequence[bytes]) -> DraftStep:
    """The inverse of `encode_draft_step`."""
    *common, drafts, tokens = frames
    step = decode_step(common)
    table = _unpack(drafts).reshape(-1, _DRAFT_FIELDS).tolist()
    row_tokens = _split(_unpack(tokens), [draft[2] for draft in table])
    return DraftStep(
        step_id=step.step_id,
        released=step.released,
        admitted=step.admitted,
        block_table_deltas=step.block_table_deltas,
        rows=step.rows,
        drafts=tuple(
            DraftRow(seq_id, computed, token_ids, count)
            for (seq_id, computed, _, count), token_ids in zip(table, row_tokens, strict=True)
        ),
    )


def encode_output(output: VerifyOutput | DraftOutput) -> Frames:
    """[header, rows [B, 2], tokens]."""
    return [
        msgpack.packb(output.step_id),
        _pack(value for row in output.rows for value in (row.seq_id, len(row.token_ids))),
        _pack(token for row in output.rows for token in row.token_ids),
    ]


def encode_error(message: str) -> Frames:
    """What a rank answers when it could not run a step."""
    return [_ERROR, message.encode()]


def error_in(frames: Sequence[bytes]) -> str | None:
    """The message of an error reply; None for any other."""
    return frames[1].decode() if frames[0] == _ERROR else None


def decode_output(frames: Sequence[bytes]) -> VerifyOutput:
    """What a target answered."""
    step_id, rows = _decode_rows(frames)
    return VerifyOutput(step_id, tuple(VerifiedRow(*row) for row in rows))


def decode_draft_output(frames: Sequence[bytes]) -> DraftOutput:
    """What a draft model answered."""
    step_id, rows = _decode_rows(frames)
    return DraftOutput(step_id, tuple(DraftedRow(*row) for row in rows))


def _decode_rows(frames: Sequence[bytes]) -> tuple[int, list[tuple[int, tuple[int, ...]]]]:
    """The id of the step, and a sequence id with its tokens for each row."""
    header, rows, tokens = frames
    step_id: int = msgpack.unpackb(header)
    table = _unpack(rows).reshape(-1, 2).tolist()
    row_tokens = _split(_unpack(tokens), [count for _, count in table])
    return step_id, [
        (seq_id, token_ids) for (seq_id, _), token_ids in zip(table, row_tokens, strict=True)
    ]


def _pack(values: Iterable[int]) -> bytes:
    return np.fromiter(values, dtype="<i4").tobytes()


def _unpack(frame: bytes) -> Int32Array:
    return np.frombuffer(frame, dtype="<i4")


def _split(values: Int32Array, counts: list[int]) -> list[tuple[int, ...]]:
    bounds = accumulate(counts, initial=0)
    return [tuple(values[start:end].tolist()) for start, end in pairwise(bounds)]
