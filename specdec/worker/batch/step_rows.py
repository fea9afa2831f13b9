"""What the rows of a step mean for its tensors: which logits they need, and which are valid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from specdec.types.drafts.draft_tree import BASE
from specdec.types.messages import StepRow, VerifiedRow


def positions_to_verify(rows: Sequence[StepRow]) -> list[int]:
    """Return the indices of the logits of the last known tokens and the drafts, in order."""
    positions, end = list[int](), 0
    for row in rows:
        start, end = end, end + 1 + row.num_guesses
        positions.extend(range(start, start + 1 + row.num_draft_tokens))
    return positions


def positions_of_guesses(rows: Sequence[StepRow]) -> list[int]:
    """Return the indices of the logits of all guesses of rows with lookahead tokens, in order."""
    positions, end = list[int](), 0
    for row in rows:
        start, end = end, end + 1 + row.num_guesses
        if row.num_lookahead_tokens:
            positions.extend(range(start + 1, end))
    return positions


def scored_tokens(rows: Sequence[StepRow]) -> list[int]:
    """Return the flat indices of the tokens whose logits are needed, in the order of the rows."""
    scored: list[int] = []
    end = 0
    for row in rows:
        end += len(row.token_ids)
        if row.samples:
            scored.extend(range(end - row.num_guesses - 1, end))
    return scored


def valid_tokens(
    row: StepRow, token_ids: tuple[int, ...], is_invalid: Sequence[bool]
) -> tuple[int, ...]:
    """Return the new tokens of a row before the first invalid logits on their path.

    is_invalid: [num_draft_tokens + 1].
    """
    if True not in is_invalid:
        return token_ids
    scored = (BASE, *row.accepted_drafts(token_ids[:-1]))
    own = [is_invalid[node + 1] for node in scored]
    return token_ids[: own.index(True)] if True in own else token_ids


def invalid_chunks(rows: Sequence[StepRow], hidden: Tensor) -> Iterator[VerifiedRow]:
    """Yield the rows that do not sample and whose hidden states [T, hidden_size] have NaN or Inf.

    Their KV is invalid too, and must not be shared with other requests through the prefix cache.
    """
    if all(row.samples for row in rows):
        return
    is_finite: list[bool] = hidden.isfinite().all(1).tolist()
    end = 0
    for row in rows:
        start, end = end, end + len(row.token_ids)
        if not row.samples and not all(is_finite[start:end]):
            yield VerifiedRow(row.seq_id, (), has_bad_logits=True)


def split_rows(rows: Sequence[StepRow]) -> Sequence[Sequence[StepRow]]:
    """Return two smaller parts of a step: half of its rows each, or half of a chunk of a prompt.

    Returns none where it is a single token and its guesses.
    """
    if len(rows) > 1:
        middle = len(rows) // 2
        return rows[:middle], rows[middle:]
    [row] = rows
    if row.num_known_tokens == 1:
        return ()
    middle = row.num_known_tokens // 2
    first = row._replace(
        token_ids=row.token_ids[:middle],
        num_draft_tokens=0,
        num_lookahead_tokens=0,
        samples=False,
        drafting=row.drafting._replace(probs=None, parents=None),
        grammar_mask=None,
    )
    start = row.num_computed_tokens + middle
    return (first,), (row._replace(token_ids=row.token_ids[middle:], num_computed_tokens=start),)
