"""Drafter of one rank at the end of its steps: a draft head, lookups, or both."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specdec.config.engine import EngineConfig
from specdec.config.speculation.methods import NgramConfig
from specdec.kernels.reference.forward_batch import ForwardBatch, SlotMove
from specdec.kernels.reference.ngram import NgramLengths
from specdec.types.messages import StepInput, StepRow, VerifiedRow
from specdec.worker.head.lookup import LookupRunner
from specdec.worker.head.parts import DrafterParts, Verified
from specdec.worker.head.runner import HeadRunner


class RankDrafter:
    """Drafts for the rows that want some (`RowDrafting`), equally on all ranks.

    The head drafts for all of them, and lookups take its place where the text has occurred before.
    """

    def __init__(self, head: HeadRunner | None, lookups: LookupRunner | None) -> None:
        """At least one of both."""
        assert head is not None or lookups is not None
        self._head, self._lookups = head, lookups
        self._drafters = [each for each in (head, lookups) if each is not None]

    @property
    def has_lookups(self) -> bool:
        """Return whether n-grams are looked up."""
        return self._lookups is not None

    @property
    def taps(self) -> tuple[int, ...]:
        """See DraftHead."""
        return () if self._head is None else self._head.taps

    @property
    def follows_steps(self) -> bool:
        """Return whether drafts need what each earlier step of a sequence has left.

        That is the KV of pairs, or the text.
        """
        return any(each.follows_steps for each in self._drafters)

    @property
    def parts(self) -> DrafterParts:
        """Return what steps on the device draft with."""
        return DrafterParts(
            None if self._head is None else self._head.parts,
            None if self._lookups is None else self._lookups.parts,
        )

    def has_pairs_before(self, row: StepRow) -> bool:
        """Return whether drafts may follow a known row: whether it has what was left before it.

        The host knows the text of a row that follows no step in flight.
        """
        if self._head is None or not row.drafting.num_next:
            return True
        return self._head.has_pairs_before(row)

    def prepare_device_step(self) -> None:
        """Store what a step on the device reads; a collective call."""
        if self._head is not None:
            self._head.prepare_device_step()

    def note_device_step(self, rows: Sequence[StepRow], verified: Verified) -> None:
        """Record a step that ran on the device, with drafts after the rows that want some."""
        for drafter in self._drafters:
            drafter.note_device_step(rows, verified)

    def note_output(self, verified: Sequence[VerifiedRow]) -> None:
        """Record the new tokens of rows that the host has verified, of a step on the device."""
        for drafter in self._drafters:
            drafter.note_output(verified)

    def update(self, step: StepInput) -> None:
        """Apply the sequences' changes of a step."""
        for drafter in self._drafters:
            drafter.update(step)

    def draft(
        self,
        rows: Sequence[StepRow],
        batch: ForwardBatch,
        states: Tensor,
        verified: Verified,
        moves: Sequence[SlotMove],
    ) -> Verified:
        """Record a step, and draft after its verified rows; return them with their drafts.

        rows: of the step, whose tokens are `batch`. states: of this pass, as in
        `DraftHead.features`. moves: of the KV of the target after it. A collective call.
        """
        if self._head is not None:
            verified = self._head.draft(rows, batch, states, verified, moves)
        return verified if self._lookups is None else self._lookups.draft(rows, verified)

    def draft_next(self, rows: Sequence[StepRow], states: Tensor, verified: Verified) -> Verified:
        """Draft after a step that was recorded, by `draft` or by `note_device_step`.

        The latter got rows without the drafts that these want. A collective call.
        """
        if self._head is not None:
            verified = self._head.draft_next(rows, states, verified)
        return verified if self._lookups is None else self._lookups.draft_next(rows, verified)


def rank_drafter(head: HeadRunner | None, limits: EngineConfig) -> RankDrafter | None:
    """Return what drafts on a rank with a head, or without one; None where nothing does."""
    drafters = limits.speculation.rank_drafters if limits.speculation else ()
    config = next((each for each in drafters if isinstance(each, NgramConfig)), None)
    if config is None:
        return None if head is None else RankDrafter(head, None)
    ngrams = NgramLengths(config.prompt_lookup_min, config.prompt_lookup_max)
    return RankDrafter(head, LookupRunner(ngrams, limits.max_model_len))
