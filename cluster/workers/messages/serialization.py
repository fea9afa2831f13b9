"""Serialization of step messages: a msgpack header and frames of numbers.

Only numbers and short strings are decoded, so a message cannot carry code.

The output of a step of decodes without drafts has a short form, as its rows have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
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
from cluster.workers.messages.row_serialization import decode_rows, encode_rows
from specdec.sequences.decode_rows import RepeatedRows, SampledTokens
from specdec.types.messages import (
    BlockTableDelta,
    Logprobs,
    PromptLogprobs,
    SequenceAdmission,
    Snapshot,
    StepInput,
    StepRow,
    VerifiedRow,
    VerifyOutput,
)
from specdec.types.sampling.reasoning_marks import ReasoningMarks
from specdec.types.sampling.sampling_params import StructuredOutput
from specdec.types.sampling.sampling_spec import Replay, SamplingRules, Verifier

STOP: Frames = [b"stop"]
CAUGHT_UP: Frames = [b"caught up"]
"""A draft model's second answer to a step, once it has run the step's prefill chunks too."""

HEARTBEAT: Frames = [b"heartbeat"]
"""Keeps the seat of a Router at a shared draft worker."""

_ERROR = b"error"


def encode_step(step: StepInput) -> Frames:
    """Encode as a header, then the rows that the rank lacks.

    The header of rows that repeat those before also has the ids of the sequences that left; only
    those that join are sent.
    """
    admitted = [_encode_admission(each) for each in step.admitted]
    header = [step.step_id, step.released, admitted, step.block_table_deltas, step.saves]
    rows = step.rows
    if isinstance(rows, RepeatedRows):
        header.append(rows.left)
        rows = rows.joining
    return [msgpack.packb(header), *encode_rows(rows)]


def decode_step(frames: Sequence[bytes], before: Sequence[StepRow] = ()) -> StepInput:
    """Decode the frames of `encode_step`. before: the rows of the step that was sent before."""
    step_id, released, admitted, deltas, saves, *repeated = msgpack.unpackb(
        frames[0], use_list=False
    )
    rows: Sequence[StepRow] = decode_rows(frames[1:])
    if repeated:
        rows = RepeatedRows.after(before, repeated[0], tuple(rows))
    return StepInput(
        step_id=step_id,
        released=released,
        admitted=tuple(_admission(*fields) for fields in admitted),
        block_table_deltas=tuple(BlockTableDelta(*delta) for delta in deltas),
        rows=rows,
        saves=tuple((seq_id, Snapshot(*snapshot)) for seq_id, snapshot in saves),
    )


def encode_output(output: VerifyOutput) -> Frames:
    """Encode as [header, rows [B, 10], tokens, prompts [P, 5], 3 logprobs arrays].

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
            row.next_draft_is_lookup,
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
    table, prompt_table = unpack_table(rows, 10), unpack_table(prompts, 5)
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
    seq_id, count, num_lookahead, width, num_given, is_bad, num_drafts, *kinds = row
    is_tree, is_sure, is_lookup = kinds
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
        bool(is_lookup),
    )


def encode_error(message: str) -> Frames:
    """Encode a rank's answer to a step that failed."""
    return [_ERROR, message.encode()]


def error_in(frames: Sequence[bytes]) -> str | None:
    """Return the message of an error answer; None for other answers."""
    return frames[1].decode() if frames[0] == _ERROR else None


def _encode_admission(admission: SequenceAdmission) -> list[Any]:
    grammar = None if admission.grammar is None else asdict(admission.grammar)
    rules, verifier = _rule_values(admission.rules), _verifier_values(admission.rules.verifier)
    known = admission.seq_id, admission.num_prompt_tokens
    others = admission.token_ids, grammar, admission.is_trial, admission.snapshot
    return [*known, rules, verifier, *others]


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
    is_trial: bool,
    snapshot: tuple[int, int] | None,
) -> SequenceAdmission:
    known = dict(zip(_RULES, rules, strict=True))
    if known["replay"] is not None:
        known["replay"] = Replay(*known["replay"])
    return SequenceAdmission(
        seq_id,
        num_prompt_tokens,
        SamplingRules(**known, verifier=Verifier(*verifier)),
        token_ids,
        None if grammar is None else _grammar(**grammar),
        is_trial,
        None if snapshot is None else Snapshot(*snapshot),
    )


def _grammar(reasoning: dict[str, Any] | None, **form: Any) -> StructuredOutput:
    marks = None if reasoning is None else ReasoningMarks(**reasoning)
    return StructuredOutput(**form, reasoning=marks)


def _is_one_token(row: VerifiedRow) -> bool:
    """Return whether a result is one token and nothing else."""
    return (
        len(row.token_ids) == 1
        and row.logprobs is None
        and not (row.has_bad_logits or row.lookahead_token_ids or row.next_draft_token_ids)
    )


def _listed(logprobs: Logprobs | None) -> tuple[int, int]:
    """Return the number of tokens listed at each position, and how many the request names."""
    return (0, 0) if logprobs is None else (logprobs.token_ids.shape[1], logprobs.num_given)
