"""Prompt lookup on a rank of the target, at the end of each step.

It drafts what `speculation.proposers.ngram` drafts in the engine's process, after the tokens that
the step has verified. The texts are on the device too, where steps run there
(`worker.device.head.lookup`); here are those that the host knows, and the drafts after its steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specdec.kernels.reference.ngram import NgramLengths, Texts, lookup
from specdec.types.messages import StepInput, StepRow, VerifiedRow
from specdec.worker.head.parts import LookupParts, Verified
from specdec.worker.head.texts import SequenceTexts


class LookupRunner:
    """Drafts of a rank by prompt lookup. parts: what steps on the device look up.

    The device has no text of a sequence that it has not drafted for: it is copied from here.
    """

    def __init__(self, ngrams: NgramLengths, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self.parts = LookupParts(ngrams, SequenceTexts())

    @property
    def follows_steps(self) -> bool:
        """Return True: lookups need the text."""
        return True

    @property
    def _texts(self) -> SequenceTexts:
        return self.parts.texts

    def update(self, step: StepInput) -> None:
        """Apply the sequences' changes of a step."""
        self._texts.update(step)

    def note_device_step(self, rows: Sequence[StepRow], verified: Sequence[VerifiedRow]) -> None:
        """Record a step that ran on the device, without the rows that the host verifies."""
        for row in rows:
            self._texts.follow(row)
        self.note_output(verified)

    def note_output(self, verified: Sequence[VerifiedRow]) -> None:
        """Record the new tokens of rows."""
        for row in verified:
            self._texts.append(row.seq_id, row.token_ids)

    def draft(self, rows: Sequence[StepRow], verified: Verified) -> Verified:
        """Record a step of the host, and draft after its verified rows."""
        self.note_device_step(rows, verified)
        return self.draft_next(rows, verified)

    def draft_next(self, rows: Sequence[StepRow], verified: Verified) -> Verified:
        """Draft after the verified rows of a step that was recorded.

        Rows without an occurrence keep what a head has drafted.
        """
        wanted = {row.seq_id: row.drafting.num_lookup for row in rows if row.samples}
        return tuple(self._with_draft(row, wanted.get(row.seq_id, 0)) for row in verified)

    def _with_draft(self, row: VerifiedRow, num_wanted: int) -> VerifiedRow:
        draft = self._draft(row.seq_id, num_wanted) if row.token_ids else ()
        if not draft:
            return row
        return row._replace(next_draft_token_ids=draft, next_draft_is_lookup=True)

    def _draft(self, seq_id: int, num_wanted: int) -> tuple[int, ...]:
        """Return a draft that leaves room for a token of the target after it."""
        text = self._texts[seq_id]
        count = min(num_wanted, self._max_model_len - 1 - len(text))
        if count < 1:
            return ()
        place, length = torch.zeros(1, dtype=torch.int64), torch.tensor([len(text)])
        texts = Texts(torch.from_numpy(np.array(text, np.int32))[None], place, length)
        found = lookup(texts, torch.tensor([count]), self.parts.ngrams, count)
        num_tokens, *tokens = found[0].tolist()
        return tuple(tokens[:num_tokens])
