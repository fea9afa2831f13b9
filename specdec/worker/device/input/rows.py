"""Rows of a step as the device runs them: their tokens and drafts."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import chain

from specdec.types.messages import StepRow


def num_drafts(row: StepRow) -> int:
    """Return the draft tokens of a row, at most of one whose drafts the device holds."""
    return row.drafting.num_held if row.is_pending else row.num_draft_tokens


def num_tokens(row: StepRow) -> int:
    """Return the tokens that a row runs, at most of one whose drafts the device holds."""
    return row.num_known_tokens + num_drafts(row)


def is_prompt(row: StepRow) -> bool:
    """Return whether a row has tokens before its last known one, or does not sample."""
    return len(row.token_ids) > 1 + row.num_draft_tokens or not row.samples


def without_next_drafts(rows: Sequence[StepRow], seq_ids: Container[int]) -> list[StepRow]:
    """Return rows after which nothing is drafted for some sequences."""
    return [
        row._replace(drafting=row.drafting._replace(num_next=0, next_depth=0, num_lookup=0))
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
