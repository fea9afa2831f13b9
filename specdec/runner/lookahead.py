"""Which rows of logits are verified, and which are looked at for what follows a guess.

Each row of a step that samples has logits of its last known token, then of its drafts, then of its
lookahead tokens. The first two are verified. Where there is a lookahead, the target's answers to
all guesses are told, to drafts too: behind a rejected one they are guesses as good as others.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from specdec.step import StepRow


def places_to_verify(rows: Many[StepRow]) -> list[int]:
    """Indices of the logits of the last known tokens and the drafts, in order."""
    places, end = list[int](), 0
    for row in rows:
        start, end = end, end + 1 + row.num_guesses
        places.extend(range(start, start + 1 + row.num_draft_tokens))
    return places


def places_of_guesses(rows: Many[StepRow]) -> list[int]:
    """Indices of the logits of the guesses of rows that have lookahead tokens, in order."""
    places, end = list[int](), 0
    for row in rows:
        start, end = end, end + 1 + row.num_guesses
        if row.num_lookahead_tokens:
            places.extend(range(start + 1, end))
    return places
