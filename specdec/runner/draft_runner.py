"""One rank's worker of a draft model: continues sequences by a few tokens each, with its own KV."""

from __future__ import annotations

from collections.abc import Sequence as Many
from itertools import compress

import torch
from torch import Tensor

from specdec.models import LlamaForCausalLM
from specdec.parallel import TensorParallelGroup
from specdec.runner.runner import Runner
from specdec.runner.sequences import SampledToken
from specdec.runner.target_order import TargetOrder
from specdec.sampling import sample
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
from specdec.vocabulary import VocabularyMap, drafts_text


class DraftRunner(Runner):
    """Executes draft steps in order. With several ranks every one gets the same steps.

    A draft token is what the draft model draws with the noise that the target will draw with
    (`specdec.verification`), so an accurate draft is accepted at any temperature.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        group: TensorParallelGroup,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        vocabulary: VocabularyMap | None = None,
    ) -> None:
        """vocabulary: how the target's tokens are the draft's, where their ids differ."""
        super().__init__(
            model, group, num_blocks=num_blocks, block_size=block_size, vocab_size=vocab_size
        )
        self._target_order = (
            None
            if vocabulary is None or vocabulary.has_equal_ids
            else TargetOrder(vocabulary, group, self.kv_cache.device)
        )

    @torch.inference_mode()
    def draft(self, step: DraftStep) -> DraftOutput:
        """Takes over the step's news and makes its drafts; the same result on every rank."""
        self._sequences.update(step)
        drafts: dict[int, list[int]] = {row.seq_id: [] for row in step.drafts}
        rows = [
            StepRow(row.seq_id, row.num_computed_tokens, row.token_ids, 0, True)
            for row in step.drafts
        ]
        asked = {row.seq_id: row for row in step.drafts}
        while rows:
            coming = [
                SampledToken(row.seq_id, asked[row.seq_id].first_index + len(drafts[row.seq_id]))
                for row in rows
            ]
            for row, token in zip(rows, self._next_tokens(rows, coming), strict=True):
                drafts[row.seq_id].append(token)
            rows = [
                StepRow(row.seq_id, row.end, (drafts[row.seq_id][-1],), 0, True)
                for row in rows
                if len(drafts[row.seq_id]) < asked[row.seq_id].num_draft_tokens
            ]
        return DraftOutput(
            step.step_id,
            tuple(DraftedRow(seq_id, tuple(tokens)) for seq_id, tokens in drafts.items()),
        )

    @torch.inference_mode()
    def catch_up(self, step: DraftStep) -> None:
        """Runs the step's chunks of text that the draft model has not seen yet; after `draft`."""
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
        row = DraftRow(-1, num_tokens, (0,), 1, num_tokens + 1)
        self.draft(DraftStep(-1, (), (), (), (), (row,)))
        self.draft(DraftStep(-1, (-1,), (), (), (), ()))

    def _next_tokens(self, rows: Many[StepRow], coming: Many[SampledToken]) -> list[int]:
        """What the draft model draws after the last token of each row."""
        batch = self._sequences.model_input(rows)
        last = [end - 1 for end in batch.cu_seqlens_q[1:]]
        drawn: list[int] = self._draw(self.model(batch, self.kv_cache)[last], coming).tolist()
        return drawn

    def _draw(self, hidden: Tensor, tokens: Many[SampledToken]) -> Tensor:
        """Token ids of the draft's vocabulary."""
        if self._target_order is None:
            return super()._draw(hidden, tokens)
        is_free = torch.tensor(
            [drafts_text(self._sequences.rules(token.seq_id)) for token in tokens]
        ).to(hidden.device)
        drawn = torch.empty(len(tokens), dtype=torch.int64, device=hidden.device)
        for rows, draw in ((is_free, super()._draw), (~is_free, self._draw_shared)):
            if rows.any():
                chosen = list(compress(tokens, rows.tolist()))
                drawn[rows] = draw(hidden[rows], chosen)
        return drawn

    def _draw_shared(self, hidden: Tensor, tokens: Many[SampledToken]) -> Tensor:
        """From the tokens that the target has too, with the noise of the target's ids."""
        order = self._target_order
        assert order is not None, "no vocabulary to share tokens with"
        # Grammars and penalties, which know the target's ids, belong behind this line.
        logits = order.arrange(self.model.compute_logits(hidden))
        batch = self._sequences.sampling_batch(tokens)
        return order.draft_ids[sample(logits, batch, self.group, order.first_token, order.size)]
