"""Serialization of the rows of steps, and of the drafts in them, as frames of numbers.

Decodes without drafts have a short form: they are most rows while speculation is off, and both ends
encode and decode them between two forward passes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain

from cluster.workers.messages.frames import (
    FLOAT32,
    INT32,
    Frames,
    Numbers,
    array_reader,
    pack_arrays,
    pack_numbers,
    pack_table,
    unpack_numbers,
    unpack_table,
)
from specdec.types.messages import PLAIN_DRAFTING, DraftProbs, RowDrafting, StepRow


def encode_rows(rows: Sequence[StepRow]) -> Frames:
    """Encode as rows [B, 10], tokens, masks, and three frames of draftings.

    A row has the index of its RowDrafting among those of the step, where each record is once;
    `_encode_draftings` has their frames. Decodes without drafts have the short form rows [B, 5].
    """
    if not rows:
        return []
    if all(map(_is_plain_decode, rows)):
        return [pack_table(map(_decode_row, rows))]
    draftings = dict.fromkeys([row.drafting for row in rows])
    places = dict(zip(draftings, range(len(draftings)), strict=True))
    return [
        pack_table(_step_row(row, places[row.drafting]) for row in rows),
        pack_numbers(chain.from_iterable([row.token_ids for row in rows])),
        pack_arrays((row.grammar_mask for row in rows), INT32),
        *_encode_draftings(draftings),
    ]


def decode_rows(frames: Sequence[bytes]) -> tuple[StepRow, ...]:
    """Decode the frames of `encode_rows`: one of plain decodes, none without rows."""
    if len(frames) <= 1:
        return tuple(_plain_decode(*fields) for each in frames for fields in unpack_table(each, 5))
    rows, tokens, masks, *draftings = frames
    table = unpack_table(rows, 10)
    return tuple(_decode_step_rows(table, tokens, masks, _decode_draftings(*draftings)))


def _is_plain_decode(row: StepRow) -> bool:
    """Return whether a row is one token after which another is sampled, and nothing else."""
    return (
        len(row.token_ids) == 1
        and row.samples
        and row.grammar_mask is None
        and (row.drafting is PLAIN_DRAFTING or row.drafting == PLAIN_DRAFTING)
    )


def _decode_row(row: StepRow) -> tuple[int, ...]:
    return row.seq_id, row.num_computed_tokens, row.token_ids[0], row.adapter_id, row.max_end


def _plain_decode(
    seq_id: int, num_computed_tokens: int, token: int, adapter_id: int, max_end: int
) -> StepRow:
    return StepRow(
        seq_id, num_computed_tokens, (token,), 0, True, adapter_id=adapter_id, max_end=max_end
    )


def _step_row(row: StepRow, drafting: int) -> tuple[int, ...]:
    return (
        row.seq_id,
        row.num_computed_tokens,
        len(row.token_ids),
        row.num_draft_tokens,
        row.samples,
        drafting,
        0 if row.grammar_mask is None else row.grammar_mask.shape[1],
        row.num_lookahead_tokens,
        row.adapter_id,
        row.max_end,
    )


def _decode_step_rows(
    table: list[Numbers], tokens: bytes, masks: bytes, draftings: Sequence[RowDrafting]
) -> Iterator[StepRow]:
    row_tokens = unpack_numbers(tokens, [row[2] for row in table])
    take_mask = array_reader(masks, INT32)
    for row, token_ids in zip(table, row_tokens, strict=True):
        seq_id, computed, _, num_drafts, samples, drafting, num_words, *others = row
        mask = take_mask(num_drafts + 1, num_words) if num_words else None
        yield StepRow(
            seq_id,
            computed,
            token_ids,
            num_drafts,
            bool(samples),
            draftings[drafting],
            mask,
            *others,
        )


def _encode_draftings(draftings: Collection[RowDrafting]) -> Frames:
    """Encode as [numbers, 2 arrays of probabilities].

    The numbers of a record are their count, its five of the rank's drafts, the shape of its
    probabilities, the length of its tree, parents, and drafts by token.
    """
    return [
        pack_numbers(chain.from_iterable(map(_drafting_numbers, draftings))),
        *pack_draft_probs([each.probs for each in draftings]),
    ]


def _drafting_numbers(drafting: RowDrafting) -> Numbers:
    probs, parents, by_token, *head = drafting
    tree = parents or ()
    num_probs, width = (0, 0) if probs is None else probs.probs.shape
    numbers = (*head, num_probs, width, len(tree), *tree)
    for token_and_draft in by_token:
        numbers += (len(token_and_draft), *token_and_draft)
    return (len(numbers), *numbers)


def _decode_draftings(numbers: bytes, listed: bytes, probs: bytes) -> list[RowDrafting]:
    records = [*_records(*unpack_numbers(numbers, [len(numbers) // INT32.itemsize]))]
    shapes = ((record[5], record[6]) for record in records)
    all_probs = decode_draft_probs(shapes, listed, probs)
    return [
        _drafting(own_probs, record) for own_probs, record in zip(all_probs, records, strict=True)
    ]


def _records(numbers: Numbers) -> Iterator[Numbers]:
    """Yield the records of a sequence in which each follows its length."""
    start = 0
    while start < len(numbers):
        end = start + 1 + numbers[start]
        yield numbers[start + 1 : end]
        start = end


def _drafting(probs: DraftProbs | None, record: Numbers) -> RowDrafting:
    end = 8 + record[7]
    return RowDrafting(probs, record[8:end] or None, tuple(_records(record[end:])), *record[:5])


def pack_draft_probs(rows: Iterable[DraftProbs | None]) -> Frames:
    """Return the tokens and the probabilities of rows that have some, as two frames."""
    present = [row for row in rows if row is not None]
    return [
        pack_arrays((row.token_ids for row in present), INT32),
        pack_arrays((row.probs for row in present), FLOAT32),
    ]


def decode_draft_probs(
    shapes: Iterable[tuple[int, int]], listed: bytes, probs: bytes
) -> Iterator[DraftProbs | None]:
    """Yield an entry for each shape; None where the shape is [..., 0]."""
    take_ids, take_probs = array_reader(listed, INT32), array_reader(probs, FLOAT32)
    for shape in shapes:
        yield DraftProbs(take_ids(*shape), take_probs(*shape)) if shape[1] else None


def listed_width(listed: DraftProbs | None) -> int:
    """Return the number of tokens listed at each position."""
    return 0 if listed is None else listed.token_ids.shape[1]
