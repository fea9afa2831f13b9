"""Lookups before a head on one rank: they draft where the text has occurred before."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specdec.config.engine import EngineConfig
from specdec.config.speculation.methods import NgramConfig
from specdec.kernels.reference.forward_batch import ForwardBatch, SlotMove
from specdec.kernels.reference.ngram import NgramLengths
from specdec.types.messages import StepInput, StepRow, VerifiedRow
from specdec.worker.head.drafter import RankDrafter, Verified
from specdec.worker.head.lookup import LookupRunner
from specdec.worker.head.parts import DrafterParts
from specdec.worker.head.runner import HeadRunner


class CascadeRunner:
    """A head and lookups, a RankDrafter; the head drafts for all, and lookups take its place."""

    follows_steps = True

    def __init__(self, head: HeadRunner, lookups: LookupRunner) -> None:
        self._head, self._lookups = head, lookups

    @property
    def taps(self) -> tuple[int, ...]:
        """See DraftHead."""
        return self._head.taps

    @property
    def drafter_parts(self) -> DrafterParts:
        """Return what steps on the device draft with."""
        return DrafterParts(self._head.drafter_parts.head, self._lookups.drafter_parts.lookup)

    def has_pairs_before(self, row: StepRow) -> bool:
        """Return whether the head has what was left before a row, if it is to draft."""
        return not row.drafting.num_next or self._head.has_pairs_before(row)

    def prepare_device_step(self) -> None:
        """See HeadRunner."""
        self._head.prepare_device_step()

    def update(self, step: StepInput) -> None:
        """Apply the sequences' changes of a step."""
        self._head.update(step)
        self._lookups.update(step)

    def note_device_step(self, rows: Sequence[StepRow], verified: Verified) -> None:
        """Record a step that ran on the device."""
        self._head.note_device_step(rows, verified)
        self._lookups.note_device_step(rows, verified)

    def note_output(self, verified: Sequence[VerifiedRow]) -> None:
        """Record the new tokens of rows that the host has verified."""
        self._head.note_output(verified)
        self._lookups.note_output(verified)

    def draft(
        self,
        rows: Sequence[StepRow],
        batch: ForwardBatch,
        states: Tensor,
        verified: Verified,
        moves: Sequence[SlotMove],
    ) -> Verified:
        """See RankDrafter."""
        verified = self._head.draft(rows, batch, states, verified, moves)
        return self._lookups.draft(rows, batch, states, verified, moves)

    def draft_next(self, rows: Sequence[StepRow], states: Tensor, verified: Verified) -> Verified:
        """See RankDrafter."""
        verified = self._head.draft_next(rows, states, verified)
        return self._lookups.draft_next(rows, states, verified)


def rank_drafter(head: HeadRunner | None, limits: EngineConfig) -> RankDrafter | None:
    """Return what drafts on a rank with a head, or without one; None where nothing does."""
    drafters = limits.speculation.rank_drafters if limits.speculation else ()
    config = next((each for each in drafters if isinstance(each, NgramConfig)), None)
    if config is None:
        return head
    ngrams = NgramLengths(config.prompt_lookup_min, config.prompt_lookup_max)
    lookups = LookupRunner(ngrams, limits.max_model_len)
    return lookups if head is None else CascadeRunner(head, lookups)
