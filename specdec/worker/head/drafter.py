"""The interface between a rank's steps and what drafts at their end: a head, or lookups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from specdec.kernels.reference.forward_batch import ForwardBatch, SlotMove
from specdec.types.messages import StepInput, StepRow, VerifiedRow
from specdec.worker.head.parts import DrafterParts

Verified = tuple[VerifiedRow, ...]


class RankDrafter(Protocol):
    """Drafts for the rows that want some (`RowDrafting`), equally on all ranks.

    taps: as in DraftHead. follows_steps: whether drafts need what each earlier step of a sequence
    has left: the KV of pairs, or the text.
    """

    @property
    def taps(self) -> tuple[int, ...]: ...

    @property
    def follows_steps(self) -> bool: ...

    @property
    def drafter_parts(self) -> DrafterParts:
        """Return what steps on the device draft with."""
        ...

    def has_pairs_before(self, row: StepRow) -> bool:
        """Return whether drafts may follow a known row: whether it has what was left before it."""
        ...

    def prepare_device_step(self) -> None:
        """Store what a step on the device reads; a collective call."""
        ...

    def note_device_step(self, rows: Sequence[StepRow], verified: Verified) -> None:
        """Record a step that ran on the device, with drafts after the rows that want some."""
        ...

    def note_output(self, verified: Sequence[VerifiedRow]) -> None:
        """Record the new tokens of rows that the host has verified, of a step on the device."""
        ...

    def update(self, step: StepInput) -> None:
        """Apply the sequences' changes of a step."""
        ...

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
        ...

    def draft_next(self, rows: Sequence[StepRow], states: Tensor, verified: Verified) -> Verified:
        """Draft after a step that was recorded, by `draft` or by `note_device_step`.

        The latter got rows without the drafts that these want. A collective call.
        """
        ...
