"""Rows of a step as the device runs them: which need the host, and their numbers of tokens."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import chain

from specdec.sampling.verifiers.synthetic import num_kept_by_chance
from specdec.types.messages import StepRow
from specdec.worker.batch.batch_state import SequenceState


def num_drafts(row: StepRow) -> int:
    """Return the draft tokens of a row, at most of one whose drafts the device holds."""
    return row.drafting.num_held if row.is_pending else row.num_draft_tokens


def num_tokens(row: StepRow) -> int:
    """Return the tokens that a row runs, at most of one whose drafts the device holds."""
    return row.num_known_tokens + num_drafts(row)


def is_prompt(row: StepRow) -> bool:
    """Return whether a row has tokens before its last known one, or does not sample."""
    return len(row.token_ids) > 1 + row.num_draft_tokens or not row.samples


def fits_device(row: StepRow, state: SequenceState) -> bool:
    """Return whether the device can run a row of a sequence that `needs_checks`."""
    return (
        not (row.is_pending and verified_by_host(row, state))
        and not _has_prompt_logprobs(row, state)
        and _knows_kept(row, state)
        and _knows_tokens(row, state)
    )


def verified_by_host(row: StepRow, state: SequenceState) -> bool:
    """Return whether the host has to verify a row: by probabilities, or with other noise."""
    return row.samples and not state.verifies_on_device


def _has_prompt_logprobs(row: StepRow, state: SequenceState) -> bool:
    """Return whether a row yields log-probabilities of its prompt."""
    is_requested = state.admission.rules.prompt_logprobs is not None
    return is_requested and row.num_computed_tokens + 1 < state.admission.num_prompt_tokens


def _knows_tokens(row: StepRow, state: SequenceState) -> bool:
    """Return whether the host knows the tokens that it needs: those before bad words."""
    return not (row.is_pending and state.processor.phrases)


def _knows_kept(row: StepRow, state: SequenceState) -> bool:
    """Return whether the host knows which drafts of a row are accepted by chance, if some are."""
    return not (state.accepts_by_chance and row.is_pending and row.drafting.num_held)


def num_kept(rows: Sequence[StepRow], states: Sequence[SequenceState]) -> list[int]:
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


def without_next_drafts(rows: Sequence[StepRow], seq_ids: Container[int]) -> list[StepRow]:
    """Return rows in which a head has nothing to do for some sequences."""
    return [
        row._replace(drafting=row.drafting._replace(num_next=0, next_depth=0))
        if row.seq_id in seq_ids
        else row
        for row in rows
    ]


def flat_tokens(rows: Sequence[StepRow]) -> list[int]:
    """Return the tokens of rows, one row after the other; 0 for those that the device holds."""
    return [
        *chain.from_iterable(
            (0,) * num_tokens(row) if row.is_pending else row.token_ids for row in rows
        )
    ]
