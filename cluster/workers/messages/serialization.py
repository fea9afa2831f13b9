"""Serialization of step messages: a msgpack header and frames of numbers.

Only numbers and short strings are decoded, so a message cannot carry code.

A step of decodes without drafts, and its output, have a short form: they are most
messages while speculation is off, and both ends encode and decode them between two forward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import chain
from operator import attrgetter
from typing import Any

import msgpack

from cluster.workers.messages.frames import (
    FLOAT32,
    INT32,
    Frames,
    Numbers,
    array_reader,
    pack_arrays,
    pack_numbers,
    pack_table,
    unpack_columns,
    unpack_numbers,
    unpack_table,
)
from specdec.sequences.decode_rows import RepeatedRows, SampledTokens
from specdec.types.messages import (
    PLAIN_DRAFTING,
    BlockTableDelta,
    DraftProbs,
    Logprobs,
    PromptLogprobs,
    RowDrafting,
    SequenceAdmission,
    StepInput,
    StepRow,
    VerifiedRow,
    VerifyOutput,
)
from specdec.types.sampling.sampling_params import StructuredOutput
from specdec.types.sampling.sampling_spec import SamplingRules, Verifier

STOP: Frames = [b"stop"]
CAUGHT_UP: Frames = [b"caught up"]
"""A draft model's second answer to a step, once it has run the step's prefill chunks too."""

HEARTBEAT: Frames = [b"heartbeat"]
"""Keeps the seat of a Router at a shared draft worker."""

_ERROR = b"error"


def encode_step(step: StepInput) -> Frames:
    """Encode as [header, rows [B, 10], tokens, masks, draftings, deltas [D, 3], blocks].

    A row has the index of its RowDrafting among those of the step, where each record is once.
    draftings: three frames, see `_encode_draftings`. The short form is [header, rows [B, 5]], then
    deltas and blocks if there are any; for rows that repeat those before [header, deltas, blocks].
    """
    header = [step.step_id, step.released, [_encode_admission(each) for each in step.admitted]]
    if isinstance(step.rows, RepeatedRows):
        return [msgpack.packb(header), *_encode_deltas(step.block_table_deltas)]
    if all(map(_is_plain_decode, step.rows)):
        deltas = _encode_deltas(step.block_table_deltas) if step.block_table_deltas else ()
        return [msgpack.packb(header), pack_table(map(_decode_row, step.rows)), *deltas]
    draftings = dict.fromkeys([row.drafting for row in step.rows])
    places = dict(zip(draftings, range(len(draftings)), strict=True))
    return [
        msgpack.packb(header),
        pack_table(_step_row(row, places[row.drafting]) for row in step.rows),
        pack_numbers(chain.from_iterable([row.token_ids for row in step.rows])),
        pack_arrays((row.grammar_mask for row in step.rows), INT32),
        *_encode_draftings(draftings),
        *_encode_deltas(step.block_table_deltas),
    ]


def decode_step(frames: Sequence[bytes], before: Sequence[StepRow] = ()) -> StepInput:
    """Decode the frames of `encode_step`. before: the rows of the step that was sent before."""
    header, *others = frames
    step_id, released, admitted = msgpack.unpackb(header, use_list=False)
    step_rows: Sequence[StepRow]
    step_deltas: tuple[BlockTableDelta, ...] = ()
    if len(others) in (1, 3):
        rows, *deltas = others
        step_rows = tuple(_plain_decode(*fields) for fields in unpack_table(rows, 5))
        step_deltas = tuple(_decode_deltas(*deltas)) if deltas else ()
    elif len(others) == 2:
        step_rows, step_deltas = RepeatedRows.after(before), tuple(_decode_deltas(*others))
    else:
        rows, tokens, masks, *draftings, changed, blocks = others
        step_deltas = tuple(_decode_deltas(changed, blocks))
        step_rows = tuple(
            _decode_step_rows(unpack_table(rows, 10), tokens, masks, _decode_draftings(*draftings))
        )
    return StepInput(
        step_id=step_id,
        released=released,
        admitted=tuple(_admission(*fields) for fields in admitted),
        block_table_deltas=step_deltas,
        rows=step_rows,
    )


def _encode_deltas(deltas: Sequence[BlockTableDelta]) -> Frames:
    table = ((delta.seq_id, delta.start, len(delta.block_ids)) for delta in deltas)
    return [pack_table(table), pack_numbers(block for delta in deltas for block in delta.block_ids)]


def _decode_deltas(deltas: bytes, blocks: bytes) -> Iterator[BlockTableDelta]:
    table = unpack_table(deltas, 3)
    block_ids = unpack_numbers(blocks, [count for _, _, count in table])
    for (seq_id, start, _), ids in zip(table, block_ids, strict=True):
        yield BlockTableDelta(seq_id, start, ids)


def encode_output(output: VerifyOutput) -> Frames:
    """Encode as [header, rows [B, 9], tokens, prompts [P, 5], 3 logprobs arrays].

    A row's tokens are its output, lookahead and next draft tokens, then the draft's parents and
    confidences.
    Logprobs are those of the rows, then those of the prompts. The short form is [header, rows
    [B, 2]].
    """
    if not output.prompt_logprobs and all(map(_is_one_token, output.rows)):
        plain_rows = ((row.seq_id, row.token_ids[0]) for row in output.rows)
        return [msgpack.packb(output.step_id), pack_table(plain_rows)]
    rows = (
        (
            row.seq_id,
            len(row.token_ids),
            len(row.lookahead_token_ids),
            *_listed(row.logprobs),
            row.has_bad_logits,
            len(row.next_draft_token_ids),
            row.next_draft_parents is not None,
            bool(row.next_draft_confidences),
        )
        for row in output.rows
    )
    prompts = (
        (each.seq_id, each.start, len(each.logprobs), *_listed(each.logprobs))
        for each in output.prompt_logprobs
    )
    logprobs = [row.logprobs for row in output.rows if row.logprobs is not None]
    logprobs.extend(each.logprobs for each in output.prompt_logprobs)
    return [
        msgpack.packb(output.step_id),
        pack_table(rows),
        pack_numbers(number for row in output.rows for number in _verified_numbers(row)),
        pack_table(prompts),
        pack_arrays((each.token_ids for each in logprobs), INT32),
        pack_arrays((each.logprobs for each in logprobs), FLOAT32),
        pack_arrays((each.ranks for each in logprobs), INT32),
    ]


def decode_output(frames: Sequence[bytes]) -> VerifyOutput:
    """Decode the frames of `encode_output`."""
    header, rows, *others = frames
    if not others:
        return VerifyOutput(msgpack.unpackb(header), SampledTokens(*unpack_columns(rows, 2)))
    tokens, prompts, *logprobs = others
    table, prompt_table = unpack_table(rows, 9), unpack_table(prompts, 5)
    counts = [row[1] + row[2] + row[6] * (1 + row[7] + row[8]) for row in table]
    row_numbers = unpack_numbers(tokens, counts)
    take_ids, take_values, take_ranks = map(array_reader, logprobs, (INT32, FLOAT32, INT32))

    def take(count: int, width: int, num_given: int) -> Logprobs:
        columns = take_ids(count, width), take_values(count, width)
        return Logprobs(*columns, take_ranks(count), num_given)

    return VerifyOutput(
        msgpack.unpackb(header),
        tuple(
            _verified_row(row, numbers, take)
            for row, numbers in zip(table, row_numbers, strict=True)
        ),
        tuple(
            PromptLogprobs(seq_id, start, take(*shape)) for seq_id, start, *shape in prompt_table
        ),
    )


def _verified_numbers(row: VerifiedRow) -> Numbers:
    tokens = row.token_ids + row.lookahead_token_ids
    if not row.next_draft_token_ids:
        return tokens
    parents, confidences = row.next_draft_parents or (), row.next_draft_confidences
    return tokens + row.next_draft_token_ids + parents + confidences


def _verified_row(row: Numbers, numbers: Numbers, take: Callable[..., Logprobs]) -> VerifiedRow:
    seq_id, count, num_lookahead, width, num_given, is_bad, num_drafts, is_tree, is_sure = row
    logprobs = take(count, width, num_given) if width else None
    end = count + num_lookahead
    drafts = numbers[end : end + num_drafts]
    parents = numbers[end + num_drafts :][:num_drafts] if is_tree else None
    return VerifiedRow(
        seq_id,
        numbers[:count],
        logprobs,
        bool(is_bad),
        numbers[count:end],
        drafts,
        parents,
        numbers[len(numbers) - num_drafts :] if is_sure else (),
    )


def encode_error(message: str) -> Frames:
    """Encode a rank's answer to a step that failed."""
    return [_ERROR, message.encode()]


def error_in(frames: Sequence[bytes]) -> str | None:
    """Return the message of an error answer; None for other answers."""
    return frames[1].decode() if frames[0] == _ERROR else None


def _encode_admission(admission: SequenceAdmission) -> list[Any]:
    grammar = None if admission.grammar is None else vars(admission.grammar)
    rules, verifier = _rule_values(admission.rules), _verifier_values(admission.rules.verifier)
    known = admission.seq_id, admission.num_prompt_tokens
    return [*known, rules, verifier, admission.token_ids, grammar]


_RULES = [each.name for each in fields(SamplingRules) if each.name != "verifier"]
_rule_values = attrgetter(*_RULES)
_verifier_values = attrgetter(*(each.name for each in fields(Verifier)))


def _admission(
    seq_id: int,
    num_prompt_tokens: int,
    rules: Sequence[Any],
    verifier: Sequence[Any],
    token_ids: tuple[int, ...],
    grammar: dict[str, Any] | None,
) -> SequenceAdmission:
    return SequenceAdmission(
        seq_id,
        num_prompt_tokens,
        SamplingRules(**dict(zip(_RULES, rules, strict=True)), verifier=Verifier(*verifier)),
        token_ids,
        None if grammar is None else StructuredOutput(**grammar),
    )


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


def _is_one_token(row: VerifiedRow) -> bool:
    """Return whether a result is one token and nothing else."""
    return (
        len(row.token_ids) == 1
        and row.logprobs is None
        and not (row.has_bad_logits or row.lookahead_token_ids or row.next_draft_token_ids)
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

    The numbers of a record are their count, its four of the head, the shape of its probabilities,
    the length of its tree, parents, and drafts by token.
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
    for token, *draft in by_token:
        numbers += (token, len(draft), *draft)
    return (len(numbers), *numbers)


def _decode_draftings(numbers: bytes, listed: bytes, probs: bytes) -> list[RowDrafting]:
    records = [*_drafting_records(*unpack_numbers(numbers, [len(numbers) // INT32.itemsize]))]
    shapes = ((record[4], record[5]) for record in records)
    all_probs = decode_draft_probs(shapes, listed, probs)
    return [
        _drafting(own_probs, record) for own_probs, record in zip(all_probs, records, strict=True)
    ]


def _drafting_records(numbers: Numbers) -> Iterator[Numbers]:
    start = 0
    while start < len(numbers):
        end = start + 1 + numbers[start]
        yield numbers[start + 1 : end]
        start = end


def _drafting(probs: DraftProbs | None, record: Numbers) -> RowDrafting:
    end = 7 + record[6]
    by_token = tuple(_drafts_by_token(record[end:])) if len(record) > end else ()
    return RowDrafting(probs, record[7:end] or None, by_token, *record[:4])


def _drafts_by_token(numbers: Numbers) -> Iterator[Numbers]:
    start = 0
    while start < len(numbers):
        end = start + 2 + numbers[start + 1]
        yield (numbers[start], *numbers[start + 2 : end])
        start = end


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


def _listed(logprobs: Logprobs | None) -> tuple[int, int]:
    """Return the number of tokens listed at each position, and how many the request names."""
    return (0, 0) if logprobs is None else (logprobs.token_ids.shape[1], logprobs.num_given)


def listed_width(listed: DraftProbs | None) -> int:
    """Return the number of tokens listed at each position."""
    return 0 if listed is None else listed.token_ids.shape[1]
