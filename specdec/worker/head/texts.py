"""Texts of the sequences of a rank, for what drafts by the tokens alone."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from specdec.types.messages import StepInput, StepRow


class SequenceTexts:
    """Tokens of the sequences of a rank, as far as the host knows them."""

    def __init__(self) -> None:
        self._tokens: dict[int, array[int]] = {}

    def __getitem__(self, seq_id: int) -> array[int]:
        return self._tokens[seq_id]

    def update(self, step: StepInput) -> None:
        """Apply the releases and admissions of a step."""
        for seq_id in step.released:
            del self._tokens[seq_id]
        for admission in step.admitted:
            self._tokens[admission.seq_id] = array("i", admission.token_ids)

    def follow(self, row: StepRow) -> bool:
        """Take the known tokens of a row; return whether others stood in their place, or none."""
        own, start, known = self._tokens[row.seq_id], row.num_computed_tokens, row.known
        end = start + len(known)
        changes = tuple(own[start:end]) != known
        if changes:
            own[start:end] = array("i", known)
        if row.samples:
            del own[end:]
        return changes

    def append(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """Append verified tokens."""
        self._tokens[seq_id].extend(token_ids)
