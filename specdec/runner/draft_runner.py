"""One rank's worker of a draft model: continues sequences by a few tokens each, with its own KV."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch

from specdec.runner.runner import Runner
from specdec.runner.sequences import SampledToken
from specdec.sampling_rules import SamplingRules
from specdec.step import (
    BlockTableDelta,
    DraftedRow,
    DraftOutput,
    DraftRow,
    DraftStep,
    SequenceAdmission,
    StepRow,
)


class DraftRunner(Runner):
    """Executes draft steps in order. With several ranks every one gets the same steps.

    A draft token is what the draft model draws with the noise that the target will draw with
    (`specdec.verification`), so an accurate draft is accepted at any temperature.
    """

    @torch.inference_mode()
    def draft(self, step: DraftStep) -> DraftOutput:
        """Takes over the step's news and makes its drafts; the same result on every rank."""
        self._sequences.update(step)
        drafts: dict[int, list[int]] = {row.seq_id: [] for row in step.drafts}
        rows = [
            StepRow(row.seq_id, row.num_computed_tokens, row.token_ids, 0, True)
            for row in step.drafts
        ]
        wanted = {row.seq_id: row.num_draft_tokens for row in step.drafts}
        while rows:
            for row, token in zip(rows, self._next_tokens(rows), strict=True):
                drafts[row.seq_id].append(token)
            rows = [
                StepRow(row.seq_id, row.end, (drafts[row.seq_id][-1],), 0, True)
                for row in rows
                if len(drafts[row.seq_id]) < wanted[row.seq_id]
            ]
        return DraftOutput(
            step.step_id,
            tuple(DraftedRow(seq_id, tuple(tokens)) for seq_id, tokens in drafts.items()),
        )

    @torch.inference_mode()
    def catch_up(self, step: DraftStep) -> None:
        """Runs the step's chunks of text that the draft model has not seen yet; after `draft`."""
        if step.rows:
            self._sequences.follow(step.rows)
            self.model(self._sequences.model_input(step.rows), self.kv_cache)

    def warm_up(self, num_tokens: int) -> None:
        """Runs one prefill of `num_tokens` and one draft, so that the first request is not slow.

        Uses the first blocks of the pool, which must hold nothing yet.
        """
        num_blocks = -(-(num_tokens + 1) // self.block_size)
        admission = SequenceAdmission(-1, num_tokens, SamplingRules(top_p=0.9))
        table = BlockTableDelta(-1, 0, tuple(range(num_blocks)))
        chunk = StepRow(-1, 0, (0,) * num_tokens, 0, False)
        first = DraftStep(-1, (), (admission,), (table,), (chunk,), ())
        self.draft(first)
        self.catch_up(first)
        self.draft(DraftStep(-1, (), (), (), (), (DraftRow(-1, num_tokens, (0,), 1),)))
        self.draft(DraftStep(-1, (-1,), (), (), (), ()))

    def _next_tokens(self, rows: Many[StepRow]) -> list[int]:
        """What the draft model draws after the last token of each row."""
        self._sequences.follow(rows)
        batch = self._sequences.model_input(rows)
        last = [end - 1 for end in batch.cu_seqlens_q[1:]]
        logits = self._logits(self.model(batch, self.kv_cache)[last])
        logits = self._sequences.logit_edits(rows).apply(logits)
        drawn: list[int] = self._draw(
            logits, [SampledToken(row.seq_id, row.end) for row in rows]
        ).tolist()
        return drawn
