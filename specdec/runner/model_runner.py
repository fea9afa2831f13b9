"""One rank's worker of the target: runs a step's forward pass and verifies it."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.runner.runner import Runner
from specdec.runner.sequences import SampledToken
from specdec.sampling_rules import SamplingRules
from specdec.step import (
    BlockTableDelta,
    SequenceAdmission,
    StepInput,
    StepRow,
    VerifiedRow,
    VerifyOutput,
)
from specdec.verification import verify_coupled


class ModelRunner(Runner):
    """Executes steps in order. With several ranks every one gets the same steps."""

    @torch.inference_mode()
    def execute(self, step: StepInput) -> VerifyOutput:
        """Runs one step; the same result on every rank."""
        self._sequences.update(step)
        if not step.rows:
            return VerifyOutput(step.step_id, ())
        hidden = self.model(self._sequences.model_input(step.rows), self.kv_cache)
        return self._verify(step, hidden)

    def warm_up(self, num_tokens: int) -> None:
        """Runs one prefill of `num_tokens` and one decode, so that the first request is not slow.

        Uses the first blocks of the pool, which must hold nothing yet.
        """
        num_blocks = -(-(num_tokens + 1) // self.block_size)
        admission = SequenceAdmission(-1, num_tokens, SamplingRules(top_p=0.9))
        table = BlockTableDelta(-1, 0, tuple(range(num_blocks)))
        prefill = StepRow(-1, 0, (0,) * num_tokens, 0, True)
        decode = StepRow(-1, num_tokens, (0,), 0, True)
        self.execute(StepInput(-1, (), (admission,), (table,), (prefill,)))
        self.execute(StepInput(-1, (), (), (), (decode,)))
        self.execute(StepInput(-1, (-1,), (), (), ()))

    def _verify(self, step: StepInput, hidden: Tensor) -> VerifyOutput:
        """hidden: [T, hidden_size]. Only the last known token and the drafts need logits."""
        rows = [row for row in step.rows if row.samples]
        if not rows:
            return VerifyOutput(step.step_id, ())
        # Each scored token defines the output token at the position after its own.
        coming = [
            SampledToken(row.seq_id, position)
            for row in rows
            for position in range(row.end - row.num_draft_tokens, row.end + 1)
        ]
        masks = [mask for row in rows for mask in _grammar_masks(row)]
        sampled = self._draw(hidden[_scored_tokens(step.rows)], coming, masks)
        drafts = [row.token_ids[len(row.token_ids) - row.num_draft_tokens :] for row in rows]
        verified = verify_coupled(sampled, drafts)
        return VerifyOutput(
            step.step_id,
            tuple(
                VerifiedRow(row.seq_id, token_ids)
                for row, token_ids in zip(rows, verified, strict=True)
            ),
        )


def _grammar_masks(row: StepRow) -> Many[NDArray[np.int32] | None]:
    """One for each token that the row scores, [num_words]; None allows all."""
    if row.grammar_mask is None:
        return [None] * (row.num_draft_tokens + 1)
    return list(row.grammar_mask)


def _scored_tokens(rows: Many[StepRow]) -> list[int]:
    """Flat indices of the tokens whose logits are needed, in the rows' order."""
    scored: list[int] = []
    end = 0
    for row in rows:
        end += len(row.token_ids)
        if row.samples:
            scored.extend(range(end - row.num_draft_tokens - 1, end))
    return scored
