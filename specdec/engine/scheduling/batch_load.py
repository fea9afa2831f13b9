"""Counts of the running sequences that decode and that may have drafts."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from specdec.sequences.sequence import Sequence
from specdec.types.control import SpeculationControl
from specdec.types.drafts.draft_decision import PromptLoad


class BatchLoad:
    """The running sequences that differ from most, so that a step need not look at all of them."""

    def __init__(self) -> None:
        # With more than a token to compute when last looked at; and with no need of drafts.
        self._prefilling: set[Sequence] = set()
        self._opted_out: set[Sequence] = set()
        self.num_predicted = 0  # with predicted output

    def join(self, seq: Sequence) -> None:
        """Add a sequence that joins the batch."""
        self.num_predicted += seq.prediction is not None
        if not seq.is_decoding:
            self._prefilling.add(seq)
        if seq.opted_out or not seq.may_draft:
            self._opted_out.add(seq)

    def leave(self, seq: Sequence) -> None:
        """Remove a sequence that leaves the batch."""
        self.num_predicted -= seq.prediction is not None
        self._prefilling.discard(seq)
        self._opted_out.discard(seq)

    def stop_drafting(self, seq: Sequence) -> None:
        """Give a sequence of the batch no drafts any more."""
        seq.may_draft = False
        self._opted_out.add(seq)

    def begin_step(self) -> None:
        """Drop those that decode by now; no step is anticipated."""
        if self._prefilling:
            self._prefilling = set(self.prefilling)

    @property
    def prefilling(self) -> list[Sequence]:
        """Sequences with more than one token to compute."""
        return [seq for seq in self._prefilling if not seq.is_decoding]

    def prompts(self, waiting: Iterable[Sequence], num_free_slots: int, most: int) -> PromptLoad:
        """Return the prompts of the batch and of those `waiting` sequences that have free slots.

        most: tokens of them in a step.
        """
        num_uncomputed = [seq.num_uncomputed_tokens for seq in self.prefilling]
        num_tokens, num_sequences = sum(num_uncomputed), len(num_uncomputed)
        for seq in waiting:
            num_free_slots -= seq.num_uncomputed_tokens
            if num_free_slots < 0:
                break
            num_tokens += seq.num_uncomputed_tokens
            num_sequences += 1
        return PromptLoad(min(num_tokens, most), num_sequences)

    def check_integrity(self, running: Collection[Sequence]) -> None:
        """Assert that the counts are those of the running sequences."""
        assert set(self.prefilling) == {seq for seq in running if not seq.is_decoding}
        assert self._opted_out == {seq for seq in running if seq.opted_out or not seq.may_draft}
        assert self.num_predicted == sum(seq.prediction is not None for seq in running)

    def num_ineligible(self, control: SpeculationControl) -> int:
        """Return how many decoding sequences may not have drafts."""
        return sum(seq.is_decoding and not seq.is_eligible(control) for seq in self._opted_out)
