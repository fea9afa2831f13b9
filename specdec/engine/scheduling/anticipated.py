"""Sequences in the state that the step in flight leaves them in, before it is done."""

from __future__ import annotations

from collections.abc import Iterable

from specdec.sequences.sequence import Sequence, SequenceStatus
from specdec.types.messages import StepRow

Row = tuple[Sequence, StepRow]
"""A sequence and its row of a step."""


class Anticipated:
    """Context in which sequences are in their state after the step in flight. Reusable.

    Its tokens are pending, and all its drafts count as accepted.
    """

    def __init__(self, in_flight: Iterable[Row]) -> None:
        # Of each sequence: computed tokens before and after the step, pending tokens and drafts.
        self._states: list[tuple[Sequence, int, int, int, int]] = []
        for seq, row in in_flight:
            if seq.status is SequenceStatus.RUNNING:
                depth = row.draft_depth if row.num_draft_tokens else 0
                num_pending = depth + 1 if row.samples else 0
                computed = seq.num_computed_tokens, row.known_end + depth
                self._states.append((seq, *computed, num_pending, depth))

    def __enter__(self) -> None:
        for seq, _, num_computed, num_pending, num_drafts in self._states:
            seq.num_computed_tokens = num_computed
            seq.num_pending, seq.num_pending_drafts = num_pending, num_drafts

    def __exit__(self, *_: object) -> None:
        for seq, num_computed, *_after in self._states:
            seq.num_computed_tokens = num_computed
            seq.num_pending = seq.num_pending_drafts = 0
