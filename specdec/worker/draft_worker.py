"""One rank's worker of a draft model: continues sequences by a few tokens each, with its own KV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from specdec.distributed.group import TensorParallelGroup
from specdec.models.loading import Decoder
from specdec.sampling import (
    Distribution,
    SamplingBatch,
    Stream,
    highest_probs,
    sample,
    scale_by_confidence,
)
from specdec.text.vocab_map import VocabularyMap, drafts_text
from specdec.types.messages import (
    BlockTableDelta,
    DraftedRow,
    DraftOutput,
    DraftProbs,
    DraftRow,
    DraftStep,
    SequenceAdmission,
    StepRow,
)
from specdec.types.sampling_spec import SamplingRules
from specdec.worker.base import Runner
from specdec.worker.batch_state import TokensToCome
from specdec.worker.draft_grammars import DraftGrammars
from specdec.worker.vocab_remap import SharedTokens, TargetOrder

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


_Draw = Callable[[Tensor, SamplingBatch, Sequence[_GrowingDraft], int], None]


class DraftRunner(Runner):
    """Executes draft steps in order. With several ranks every one gets the same steps.

    For most verifiers a draft token is what the draft model draws with the noise that the target
    will draw with (`specdec.sampling.verifiers`), so an accurate draft is accepted at any temperature.
    For those that need to know its chances it is drawn from the MAX_LISTED most likely tokens, with
    noise of its own, and comes with their probabilities: verification is exact for the distribution
    that a token did come from, whatever was cut off it.

    A draft ends early where no token is likely enough to come next, which is judged before one is
    drawn: by the distribution, so by the draft's earlier tokens alone. Whichever token is drawn is
    then verified. (To draw first and drop unlikely tokens would draw from another distribution than
    the one that verification takes it to be.) For `block` it is no different: its proof goes
    through for every draft whose end is settled by the tokens before.
    """

    def __init__(
        self,
        model: Decoder,
        group: TensorParallelGroup,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        grammars: DraftGrammars,
        vocabulary: VocabularyMap | None = None,
        confidence_threshold: float = 0.0,
    ) -> None:
        """vocabulary: how the target's tokens are the draft's, where the two differ.

        confidence_threshold: least probability, at temperature 1, of the likeliest token to go on.
        """
        super().__init__(
            model, group, num_blocks=num_blocks, block_size=block_size, vocab_size=vocab_size
        )
        self.grammars = grammars
        self._confidence_threshold = confidence_threshold
        self._target_order: TargetOrder | None = None
        self._shared_tokens: SharedTokens | None = None
        if vocabulary is not None and vocabulary.has_equal_ids:
            self._shared_tokens = SharedTokens(vocabulary, model.vocab_slice, self.kv_cache.device)
        elif vocabulary is not None:
            self._target_order = TargetOrder(vocabulary, group, self.kv_cache.device)

    def draft(self, step: DraftStep) -> DraftOutput:
        """Takes over the step's news and makes its drafts; the same result on every rank."""
        self._sequences.update(step)
        self.grammars.update(step)
        drafts = {row.seq_id: _GrowingDraft() for row in step.drafts}
        rows = [
            self._row(row.seq_id, row.num_computed_tokens, row.token_ids) for row in step.drafts
        ]
        asked = {row.seq_id: row for row in step.drafts}
        num_drafted = 0
        while rows:
            coming = [
                TokensToCome(row.seq_id, asked[row.seq_id].first_index + num_drafted)
                for row in rows
            ]
            rows = self._extend(rows, coming, [drafts[row.seq_id] for row in rows], num_drafted)
            num_drafted += 1
            rows = [
                self._row(row.seq_id, row.end, (drafts[row.seq_id].token_ids[-1],))
                for row in rows
                if num_drafted < asked[row.seq_id].num_draft_tokens
            ]
            rows = [row for row in rows if not self.grammars.is_finished(row.seq_id)]
        return DraftOutput(
            step.step_id, tuple(draft.finished(seq_id) for seq_id, draft in drafts.items())
        )

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
        row = DraftRow(-1, num_tokens, (0,), 1, num_tokens + 1)
        self.draft(DraftStep(-1, (), (), (), (), (row,)))
        self.draft(DraftStep(-1, (-1,), (), (), (), ()))

    def _row(self, seq_id: int, start: int, token_ids: tuple[int, ...]) -> StepRow:
        """Tokens to run and to draw one more after, by the sequence's grammar if it has one."""
        self.grammars.move_to(seq_id, start, token_ids)
        mask = self.grammars.mask(seq_id)
        return StepRow(seq_id, start, token_ids, 0, True, grammar_mask=mask)

    def _extend(
        self,
        rows: Sequence[StepRow],
        coming: Sequence[TokensToCome],
        drafts: Sequence[_GrowingDraft],
        num_drafted: int,
    ) -> list[StepRow]:
        """Adds what follows to the drafts, which have `num_drafted` tokens; the rows it did so for.

        The others have come to their end.
        """
        self._sequences.follow(rows)
        last = [end - 1 for end in accumulate(len(row.token_ids) for row in rows)]
        hidden = self.model(self._sequences.model_input(rows), self.kv_cache)
        logits = self._logits(hidden[last])
        logits = self._sequences.logit_edits(rows).apply(logits)
        if self._shared_tokens is not None:
            logits = self._shared_tokens.keep(logits)
        going_on = self._going_on(logits)
        for draw, members in self._ways_to_draw(rows, going_on).items():
            own = logits if len(members) == len(rows) else logits[members]
            sampling = self._sampling_batch(own, [coming[member] for member in members])
            draw(own, sampling, [drafts[member] for member in members], num_drafted)
        return [rows[index] for index in going_on]

    def _going_on(self, logits: Tensor) -> list[int]:
        """The indices of the rows of logits [num_rows, num_tokens] that are sure enough."""
        if self._confidence_threshold == 0:
            return list(range(len(logits)))
        is_sure = highest_probs(logits, self._shard) >= self._confidence_threshold
        indices: list[int] = is_sure.nonzero().flatten().tolist()
        return indices

    def _ways_to_draw(
        self, rows: Sequence[StepRow], indices: Sequence[int]
    ) -> dict[_Draw, list[int]]:
        """The indices of the rows that are drawn in each way."""
        members_of: dict[_Draw, list[int]] = {}
        for index in indices:
            members_of.setdefault(self._way_to_draw(rows[index]), []).append(index)
        return members_of

    def _way_to_draw(self, row: StepRow) -> _Draw:
        """Drafts of another vocabulary come without their chances, as if none other could come.

        That is no less exact, since chance decides about them with numbers of its own.
        """
        rules = self._sequences.rules(row.seq_id)
        if self._target_order is not None:
            return self._draw_coupled if drafts_text(rules) else self._draw_shared
        return self._draw_listed if rules.needs_draft_probs else self._draw_coupled

    def _sampling_batch(self, logits: Tensor, coming: Sequence[TokensToCome]) -> SamplingBatch:
        """How to draw each of `coming`."""
        batch = self._sequences.sampling_batch(coming)
        rules = [self._sequences.rules(token.seq_id) for token in coming]
        is_scaled = [each.scale_draft_temperature for each in rules if each.temperature > 0]
        if not any(is_scaled):
            return batch
        chosen = torch.tensor(is_scaled, device=logits.device)
        return scale_by_confidence(logits, batch, chosen, self._shard)

    def _draw_coupled(
        self,
        logits: Tensor,
        batch: SamplingBatch,
        drafts: Sequence[_GrowingDraft],
        num_drafted: int,
    ) -> None:
        """With the noise that the target draws with."""
        del num_drafted
        shard = self._shard
        drawn = sample(logits, batch, shard.group, shard.first_token, shard.vocab_size)
        for draft, token_id in zip(drafts, drawn.tolist(), strict=True):
            draft.token_ids.append(token_id)

    def _draw_shared(
        self,
        logits: Tensor,
        batch: SamplingBatch,
        drafts: Sequence[_GrowingDraft],
        num_drafted: int,
    ) -> None:
        """From the tokens that the target has too, with the noise of the target's ids."""
        del num_drafted
        order = self._target_order
        assert order is not None, "no vocabulary to share tokens with"
        drawn = sample(order.arrange(logits), batch, self.group, order.first_token, order.size)
        for draft, token_id in zip(drafts, order.draft_ids[drawn].tolist(), strict=True):
            draft.token_ids.append(token_id)

    def _draw_listed(
        self,
        logits: Tensor,
        batch: SamplingBatch,
        drafts: Sequence[_GrowingDraft],
        num_drafted: int,
    ) -> None:
        """From the most likely tokens, with noise of its own, and with their chances.

        The chances are of the target's ids, as they are for the target alone.
        """
        listed = Distribution.of_logits(logits, batch, self._shard).best(MAX_LISTED)
        offsets = torch.full_like(batch.noise_keys.positions, num_drafted)
        drawn = listed.draw(batch.noise_keys.of_stream(Stream.DRAFT, offsets))
        token_ids = listed.token_ids.cpu().numpy().astype(np.int32)
        if self._shared_tokens is not None:
            token_ids = self._shared_tokens.target_ids(token_ids)
        draft_probs = DraftProbs(token_ids, listed.probs.cpu().numpy())
        for index, (draft, token_id) in enumerate(zip(drafts, drawn.tolist(), strict=True)):
            draft.token_ids.append(token_id)
            draft.listed.append(draft_probs[index : index + 1])
