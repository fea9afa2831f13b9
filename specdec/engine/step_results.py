"""Results of a step's rows: tokens, accepted drafts, and what the next drafts begin with."""

from __future__ import annotations

import collections.abc

from specdec.sequences.decode_rows import SampledTokens
from specdec.sequences.sequence import HeadDraft, Lookahead, Sequence
from specdec.types.messages import StepRow, VerifiedRow


def results_of(rows: collections.abc.Sequence[VerifiedRow]) -> dict[int, int | VerifiedRow]:
    """Return the result of each sequence: its token where a row has one and nothing else."""
    if isinstance(rows, SampledTokens):
        return dict(zip(rows.seq_ids, rows.token_ids, strict=True))
    return {row.seq_id: row.token_ids[0] if _is_token(row) else row for row in rows}


def _is_token(row: VerifiedRow) -> bool:
    """Return whether a row has one token and nothing else."""
    has_more = row.has_bad_logits or row.next_draft_token_ids or row.lookahead_token_ids
    return len(row.token_ids) == 1 and row.logprobs is None and not has_more


def accepted_drafts(seq: Sequence, row: StepRow, token_ids: tuple[int, ...]) -> int:
    """Return the number of drafts among the new tokens of a row.

    The last token is the target's own, unless NaN logits after an accepted draft cut the row. A
    verifier that rejects by chance may have rejected the very draft that equals it.
    """
    count = row.num_accepted(token_ids)
    if seq.rules.acting_verifier == "synthetic":
        return min(count, len(token_ids) - 1)
    return count


def head_draft_of(
    seq: Sequence, verified: VerifiedRow, version: int, method: str | None
) -> HeadDraft | None:
    """Return the draft that a rank made after the verified tokens, which `seq` has by now."""
    if not verified.next_draft_token_ids:
        return None
    return HeadDraft(
        seq.num_tokens,
        seq.token_ids[-1],
        verified.next_draft_token_ids,
        verified.next_draft_parents,
        verified.next_draft_confidences,
        version,
        method,
    )


def lookahead_of(row: StepRow, verified: VerifiedRow) -> Lookahead | None:
    """Return the target's tokens after each guess of a row with lookahead tokens."""
    if not row.num_lookahead_tokens:
        return None
    lookahead = row.guesses[row.num_draft_tokens :]
    return Lookahead(row.known_end, row.drafts, lookahead, verified.lookahead_token_ids)
