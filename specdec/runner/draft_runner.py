"""One rank's worker of a draft model: continues sequences by a few tokens each, with its own KV."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch

from specdec.runner.draft_grammars import DraftGrammars
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

    grammars: DraftGrammars

    @torch.inference_mode()
    def draft(self, step: DraftStep) -> DraftOutput:
        """Takes over the step's news and makes its drafts; the same result on every rank."""
        self._sequences.update(step)
        self.grammars.update(step)
        drafts: dict[int, list[int]] = {row.seq_id: [] for row in step.drafts}
        rows = [
            self._row(row.seq_id, row.num_computed_tokens, row.token_ids) for row in step.drafts
        ]
        wanted = {row.seq_id: row.num_draft_tokens for row in step.drafts}
        while rows:
            following = []
            for row, token in zip(rows, self._next_tokens(rows), strict=True):
                drafts[row.seq_id].append(token)
                if len(drafts[row.seq_id]) < wanted[row.seq_id]:
                    following.append(self._row(row.seq_id, row.end, (token,)))
            rows = [row for row in following if not self.grammars.is_finished(row.seq_id)]
        return DraftOutput(
            step.step_id,
            tuple(DraftedRow(seq_id, tuple(tokens)) for seq_id, tokens in drafts.items()),
        )

    @torch.inference_mode()
    def catch_up(self, step: DraftStep) -> None:
        """Runs the step's chunks of text that the draft model has not seen yet; after `draft`."""
        for row in step.rows:
            self.grammars.move_to(row.seq_id, row.num_computed_tokens, row.token_ids)
        if step.rows:
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

    def _row(self, seq_id: int, start: int, token_ids: tuple[int, ...]) -> StepRow:
        """Tokens to run and to draw one more after, by the sequence's grammar if it has one."""
        self.grammars.move_to(seq_id, start, token_ids)
        mask = self.grammars.mask(seq_id)
        return StepRow(seq_id, start, token_ids, 0, True, grammar_mask=mask)

    def _next_tokens(self, rows: Many[StepRow]) -> list[int]:
        """What the draft model draws after the last token of each row."""
        batch = self._sequences.model_input(rows)
        last = [end - 1 for end in batch.cu_seqlens_q[1:]]
        hidden = self.model(batch, self.kv_cache)[last]
        drawn: list[int] = self._draw(
            hidden,
            [SampledToken(row.seq_id, row.end) for row in rows],
            [None if row.grammar_mask is None else row.grammar_mask[0] for row in rows],
        ).tolist()
        return drawn
