"""Verification of the rows of a step by the verifier of each sequence, on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.reference.sample_rows import RowArgmax
from specdec.sampling.verifiers import VERIFY, Draft, DraftBatch, VerifiedTokens, verify_equal
from specdec.sampling.verifiers.synthetic import num_kept_by_chance
from specdec.sampling.vocab_shard import VocabShard, all_ranks_argmax
from specdec.types.messages import StepRow, VerifiedRow, VerifyOutput
from specdec.types.sampling.sampling_params import VerifierName
from specdec.worker.batch.batch_state import BatchState, SequenceState, TokenSpan
from specdec.worker.batch.step_rows import positions_of_guesses


def verify_by_argmax(argmax: RowArgmax, rows: Sequence[StepRow]) -> Sequence[tuple[int, ...]]:
    """Verify rows against the argmax of their logits; return the new tokens of each."""
    drafts = [(row.drafts, row.drafting.parents, -1) for row in rows]
    return verify_equal(argmax.token_ids.tolist(), drafts)


def lookahead_tokens(
    rows: Sequence[StepRow], argmax: RowArgmax, shard: VocabShard
) -> dict[int, tuple[int, ...]]:
    """Return the argmax after each guess, by sequence with lookahead tokens; a collective call.

    argmax: of this rank's logits of the last known token and the guesses of each row.
    """
    if not (positions := positions_of_guesses(rows)):
        return {}
    guesses = argmax.take(torch.tensor(positions, device=argmax.values.device))
    best = iter(all_ranks_argmax(guesses, shard).token_ids.tolist())
    return {
        row.seq_id: tuple(islice(best, row.num_guesses)) for row in rows if row.num_lookahead_tokens
    }


def verify_in_parts(
    verify: Callable[[Sequence[StepRow], Tensor], list[VerifiedRow]],
    rows: Sequence[StepRow],
    hidden: Tensor,
    *,
    may_fail: bool,
) -> list[VerifiedRow]:
    """Verify rows by their hidden states; where the memory does not suffice, in two parts.

    hidden: [sum of num_draft_tokens + 1, hidden_size]. may_fail: whether to catch
    torch.OutOfMemoryError; with several ranks the others would wait for this one.
    """
    try:
        return verify(rows, hidden)
    except torch.OutOfMemoryError:
        if not may_fail or len(rows) == 1:
            raise
    middle = len(rows) // 2
    end = sum(1 + row.num_draft_tokens for row in rows[:middle])
    parts = ((rows[:middle], hidden[:end]), (rows[middle:], hidden[end:]))
    return [row for part in parts for row in verify_in_parts(verify, *part, may_fail=True)]


def verify_sampled(
    state: BatchState,
    shard: VocabShard,
    rows: Sequence[StepRow],
    logits: Tensor,
    argmax: RowArgmax,
) -> Sequence[tuple[int, ...]]:
    """Run the verifier of each row; return the new tokens of each. A collective call.

    logits: [sum of num_draft_tokens + 1, len(vocab_slice)]; argmax: of these rows.
    """
    members_of = _by_verifier(state, rows)
    if len(members_of) == 1:
        return _run_verifier(state, shard, next(iter(members_of)), rows, logits, argmax)
    verified: list[tuple[int, ...]] = [()] * len(rows)
    ends = np.cumsum([row.num_draft_tokens + 1 for row in rows])
    scored = np.split(np.arange(len(logits)), ends[:-1])
    for name, members in members_of.items():
        positions = np.concatenate([scored[member] for member in members])
        own = torch.from_numpy(positions).to(logits.device)
        own_rows = [rows[member] for member in members]
        tokens = _run_verifier(state, shard, name, own_rows, logits[own], argmax.take(own))
        for member, token_ids in zip(members, tokens, strict=True):
            verified[member] = token_ids
    return verified


def _run_verifier(
    state: BatchState,
    shard: VocabShard,
    name: VerifierName,
    rows: Sequence[StepRow],
    logits: Tensor,
    argmax: RowArgmax,
) -> VerifiedTokens:
    # A row samples a token after its last known one, and one after each draft token.
    spans = [TokenSpan(row.seq_id, row.known_end, row.depths) for row in rows]
    batch = state.sampling_batch(spans, argmax)
    verifiers = (state.rules(row.seq_id).verifier for row in rows)
    drafts = [
        Draft(row.drafts, verifier, row.drafting.probs, row.drafting.parents, count)
        for row, verifier, count in zip(
            rows, verifiers, num_kept_of(rows, state.states(rows)), strict=True
        )
    ]
    return VERIFY[name](logits, batch, DraftBatch(drafts, logits.device), shard)


def num_kept_of(rows: Sequence[StepRow], states: Sequence[SequenceState]) -> list[int]:
    """Return the number of drafts of each row that are accepted by chance; -1 where none are."""
    counts = [-1] * len(rows)
    chosen = [
        (index, state.admission.rules, row.known_end - state.admission.num_prompt_tokens)
        for index, (row, state) in enumerate(zip(rows, states, strict=True))
        if state.accepts_by_chance
    ]
    if not chosen:
        return counts
    found = num_kept_by_chance(
        [
            (rules, range(first, first + rows[index].num_draft_tokens))
            for index, rules, first in chosen
        ]
    )
    for (index, _, _), count in zip(chosen, found, strict=True):
        counts[index] = count
    return counts


def _by_verifier(state: BatchState, rows: Sequence[StepRow]) -> dict[VerifierName, list[int]]:
    """Group the indices of the rows by their verifier."""
    members_of: dict[VerifierName, list[int]] = {}
    for index, row in enumerate(rows):
        name = state.rules(row.seq_id).acting_verifier
        members_of.setdefault(name, []).append(index)
    return members_of


def with_rows(
    output: VerifyOutput, verified: Sequence[VerifiedRow], rows: Sequence[StepRow]
) -> VerifyOutput:
    """Return an output with `verified` in place of its rows of the same sequences, or added.

    rows: of the step, which give the order.
    """
    by_id = {row.seq_id: row for row in (*output.rows, *verified)}
    return replace(output, rows=tuple(by_id[row.seq_id] for row in rows if row.seq_id in by_id))
