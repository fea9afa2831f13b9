"""One rank's worker of a draft model: continues sequences by a few tokens each, with its own KV."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specdec.runner.draft_grammars import DraftGrammars
from specdec.runner.runner import Runner
from specdec.runner.sequences import SampledToken
from specdec.sampling import (
    Distribution,
    SamplingBatch,
    Stream,
    sample,
    scale_by_confidence,
)
from specdec.sampling_rules import SamplingRules
from specdec.step import (
    BlockTableDelta,
    DraftedRow,
    DraftOutput,
    DraftProbs,
    DraftRow,
    DraftStep,
    SequenceAdmission,
    StepRow,
)

MAX_LISTED = 256
"""A draft token whose chances are needed is drawn from so many of the most likely tokens."""


@dataclass
class _GrowingDraft:
    """The draft of one sequence, and what its tokens were drawn from, if that is needed."""

    token_ids: list[int] = field(default_factory=list)
    listed: list[DraftProbs] = field(default_factory=list)  # [1, num_listed] each

    def finished(self, seq_id: int) -> DraftedRow:
        if not self.listed:
            return DraftedRow(seq_id, tuple(self.token_ids))
        probs = np.concatenate([each.probs for each in self.listed])
        token_ids = np.concatenate([each.token_ids for each in self.listed])
        width = int((probs > 0).any(0).sum())  # the best come first
        draft_probs = DraftProbs(token_ids[:, :width], probs[:, :width])
        return DraftedRow(seq_id, tuple(self.token_ids), draft_probs)


class DraftRunner(Runner):
    """Executes draft steps in order. With several ranks every one gets the same steps.

    For most verifiers a draft token is what the draft model draws with the noise that the target
    will draw with (`specdec.verification`), so an accurate draft is accepted at any temperature.
    For those that need to know its chances it is drawn from the MAX_LISTED most likely tokens, with
    noise of its own, and comes with their probabilities: verification is exact for the distribution
    that a token did come from, whatever was cut off it.
    """

    grammars: DraftGrammars

    @torch.inference_mode()
    def draft(self, step: DraftStep) -> DraftOutput:
        """Takes over the step's news and makes its drafts; the same result on every rank."""
        self._sequences.update(step)
        self.grammars.update(step)
        drafts = {row.seq_id: _GrowingDraft() for row in step.drafts}
        rows = [
            self._row(row.seq_id, row.num_computed_tokens, row.token_ids) for row in step.drafts
        ]
        wanted = {row.seq_id: row.num_draft_tokens for row in step.drafts}
        num_drafted = 0
        while rows:
            self._extend(rows, [drafts[row.seq_id] for row in rows], num_drafted)
            num_drafted += 1
            rows = [
                self._row(row.seq_id, row.end, (drafts[row.seq_id].token_ids[-1],))
                for row in rows
                if num_drafted < wanted[row.seq_id]
            ]
            rows = [row for row in rows if not self.grammars.is_finished(row.seq_id)]
        return DraftOutput(
            step.step_id, tuple(draft.finished(seq_id) for seq_id, draft in drafts.items())
        )

    @torch.inference_mode()
    def catch_up(self, step: DraftStep) -> None:
        """Runs the step's chunks of text that the draft model has not seen yet; after `draft`."""
        for row in step.rows:
            self.grammars.move_to(row.seq_id, row.num_computed_tokens, row.token_ids)
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

    def _row(self, seq_id: int, start: int, token_ids: tuple[int, ...]) -> StepRow:
        """Tokens to run and to draw one more after, by the sequence's grammar if it has one."""
        self.grammars.move_to(seq_id, start, token_ids)
        mask = self.grammars.mask(seq_id)
        return StepRow(seq_id, start, token_ids, 0, True, grammar_mask=mask)

    def _extend(self, rows: Many[StepRow], drafts: Many[_GrowingDraft], num_drafted: int) -> None:
        """Adds what follows each row to its draft, which has `num_drafted` tokens."""
        self._sequences.follow(rows)
        batch = self._sequences.model_input(rows)
        last = [end - 1 for end in batch.cu_seqlens_q[1:]]
        logits = self._logits(self.model(batch, self.kv_cache)[last])
        logits = self._sequences.logit_edits(rows).apply(logits)
        is_listed = np.array([self._sequences.rules(row.seq_id).needs_draft_probs for row in rows])
        for members in (np.flatnonzero(~is_listed).tolist(), np.flatnonzero(is_listed).tolist()):
            if not members:
                continue
            own = logits if len(members) == len(rows) else logits[members]
            sampling = self._sampling_batch(own, [rows[member] for member in members])
            chosen = [drafts[member] for member in members]
            if is_listed[members[0]]:
                self._draw_listed(own, sampling, chosen, num_drafted)
            else:
                self._draw_coupled(own, sampling, chosen)

    def _sampling_batch(self, logits: Tensor, rows: Many[StepRow]) -> SamplingBatch:
        """How to draw what follows each row."""
        tokens = [SampledToken(row.seq_id, row.end) for row in rows]
        batch = self._sequences.sampling_batch(tokens)
        rules = [self._sequences.rules(row.seq_id) for row in rows]
        is_scaled = [each.scale_draft_temperature for each in rules if each.temperature > 0]
        if not any(is_scaled):
            return batch
        chosen = torch.tensor(is_scaled, device=logits.device)
        return scale_by_confidence(logits, batch, chosen, self._shard)

    def _draw_coupled(
        self, logits: Tensor, batch: SamplingBatch, drafts: Many[_GrowingDraft]
    ) -> None:
        shard = self._shard
        drawn = sample(logits, batch, shard.group, shard.first_token, shard.vocab_size)
        for draft, token_id in zip(drafts, drawn.tolist(), strict=True):
            draft.token_ids.append(token_id)

    def _draw_listed(
        self, logits: Tensor, batch: SamplingBatch, drafts: Many[_GrowingDraft], num_drafted: int
    ) -> None:
        listed = Distribution.of_logits(logits, batch, self._shard).best(MAX_LISTED)
        offsets = torch.full_like(batch.noise_keys.positions, num_drafted)
        drawn = listed.draw(batch.noise_keys.of_stream(Stream.DRAFT, offsets))
        token_ids = listed.token_ids.cpu().numpy().astype(np.int32)
        draft_probs = DraftProbs(token_ids, listed.probs.cpu().numpy())
        for index, (draft, token_id) in enumerate(zip(drafts, drawn.tolist(), strict=True)):
            draft.token_ids.append(token_id)
            draft.listed.append(draft_probs[index : index + 1])
