"""One rank of a draft model: extends sequences by a few tokens each, with its own KV cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from specdec.config.engine import DraftLimits
from specdec.config.gpu.graph_sizes import MAX_NEW_DRAFT_TOKENS
from specdec.models.loading import WholeDraftDecoder
from specdec.text.vocab_map import VocabularyMap
from specdec.types.draft_messages import (
    AheadOutput,
    AheadRow,
    DraftedRow,
    DraftOutput,
    DraftRow,
    DraftStep,
)
from specdec.types.messages import BlockTableDelta, SequenceAdmission, StepRow
from specdec.types.sampling.sampling_spec import SamplingRules
from specdec.worker.ahead_drafter import AheadDrafter
from specdec.worker.batch.batch_state import TokenSpan
from specdec.worker.batch.draft_grammars import DraftGrammars
from specdec.worker.device.drafts import MAX_IN_FLIGHT, DeviceDrafts
from specdec.worker.device.step_graphs import GraphBackend, GraphReport
from specdec.worker.draft_sampler import DraftSampler, PartialDraft
from specdec.worker.model_runner import LoadedModel, ModelRunner
from specdec.worker.whole_drafts import WholeDrafts


@dataclass(frozen=True)
class _MaskedPass:
    """Logits of all places of the drafts of one step.

    first_of: the row of the first place of each sequence.
    """

    logits: Tensor  # [sum of num_draft_tokens, num_tokens]
    first_of: Mapping[int, int]

    def at(self, rows: Sequence[StepRow], num_drafted: int) -> Tensor:
        """Return the logits after `num_drafted` draft tokens of each row, [num_rows, num_tokens].

        The result is a copy.
        """
        return self.logits[[self.first_of[row.seq_id] + num_drafted for row in rows]]


class DraftModelRunner(ModelRunner):
    """Executes draft steps in order; with several ranks each gets the same steps.

    `DraftSampler` selects the tokens. What is drafted while the target verifies the drafts before
    is in `AheadDrafter`.

    With a mask token one forward pass makes a whole draft (PARD, An et al. 2025, arXiv 2504.18583,
    section 3): masks stand for the draft tokens before the last, so place i is sampled from the
    model's distribution given the text and i masks. It does not depend on earlier draft tokens.

    device_drafts, whole_drafts: make the drafts of sequences that need nothing else, on a GPU and
    in the CPU kernels; those of the others are made in separate passes. None where they cannot.
    """

    device_drafts: DeviceDrafts | None = None
    whole_drafts: WholeDrafts | None = None

    def __init__(
        self,
        loaded: LoadedModel,
        limits: DraftLimits,
        *,
        grammars: DraftGrammars,
        vocabulary: VocabularyMap | None = None,
        mask_token_id: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Allocate the KV pool.

        vocabulary: map between the tokens of draft and target, if their vocabularies differ.
        mask_token_id: of a model that drafts in parallel; None to draft token by token.
        """
        super().__init__(loaded, limits)
        model, state, device = self.model, self._batch_state, self.kv_cache.device
        rows, threshold = model.vocab_slice, limits.confidence_threshold
        sampler = DraftSampler(state, self._shard, rows, device, vocabulary, threshold)
        self.grammars, self._mask_token_id, self._sampler = grammars, mask_token_id, sampler
        if isinstance(model, WholeDraftDecoder) and model.can_draft and mask_token_id is None:
            self.whole_drafts = WholeDrafts(model, self.kv_cache, state, self._shard)
        self._ahead = AheadDrafter(
            model, self.kv_cache, self.block_size, state, grammars, sampler, self.group, clock
        )

    def use_device_steps(self, backend: GraphBackend | None) -> GraphReport:
        """Let the device make drafts from now on, with graphs where it can capture them.

        Call it before the first step, on a pool with a padding block, for a model that drafts token
        by token. backend: None to launch the operators of each step one by one.
        """
        assert self._mask_token_id is None, "the host masks"
        steps, report = self._captured_steps(
            backend,
            max_draft_tokens=MAX_NEW_DRAFT_TOKENS - 1,
            num_in_flight=MAX_IN_FLIGHT,
        )
        self.device_drafts = DeviceDrafts(steps, self._batch_state, may_fail=self.group.size == 1)
        return report

    def close(self) -> None:
        """Destroy the graphs; no step may follow."""
        if self.device_drafts is not None:
            self.device_drafts.close()

    def draft(self, step: DraftStep) -> DraftOutput:
        """Apply the step's updates and return its drafts, the same on every rank."""
        self._batch_state.update(step)
        self.grammars.update(step)
        if self.device_drafts is not None:
            self.device_drafts.update(step.released, step.block_table_deltas)
        drafted, left = dict[int, DraftedRow](), step.drafts
        for drafter in (self.device_drafts, self.whole_drafts):
            if drafter is not None:
                drafted |= self._draft_plain(left, drafter)
                left = tuple(row for row in left if row.seq_id not in drafted)
        drafted |= self._draft_on_host(left)
        return DraftOutput(step.step_id, tuple(drafted[row.seq_id] for row in step.drafts))

    def _draft_plain(
        self, drafts: Sequence[DraftRow], drafter: DeviceDrafts | WholeDrafts
    ) -> dict[int, DraftedRow]:
        """Draft for the sequences that need nothing but samples of logits; return these drafts.

        There are none where the device cannot run these sequences together.
        """
        plain = [row for row in drafts if self._is_plain(row) and drafter.fits(row)]
        drafted = drafter.draft(plain)
        return {seq_id: DraftedRow(seq_id, tuple(ids)) for seq_id, ids in drafted.items()}

    def _is_plain(self, row: DraftRow) -> bool:
        """Return whether a draft is of samples alone, and continues no other tokenizer's text."""
        if row.first_index != row.num_computed_tokens + len(row.token_ids):
            return False
        return self._sampler.is_plain(row.seq_id) and not self.grammars.follows(row.seq_id)

    def _draft_on_host(self, requests: Sequence[DraftRow]) -> dict[int, DraftedRow]:
        """Draft by operators that the host launches, and whose tokens it reads."""
        drafts = {row.seq_id: PartialDraft() for row in requests}
        rows = [
            self._row(row.seq_id, row.num_computed_tokens, row.token_ids, row.adapter_id)
            for row in requests
        ]
        requested = {row.seq_id: row for row in requests}
        masked = self._masked_pass(rows, requested)
        num_drafted = 0
        while rows:
            next_logits = masked.at if masked else self._next_logits
            logits = next_logits(rows, num_drafted)
            spans = [
                TokenSpan(row.seq_id, requested[row.seq_id].first_index + num_drafted)
                for row in rows
            ]
            rows = self._extend(rows, logits, spans, [drafts[row.seq_id] for row in rows])
            num_drafted += 1
            rows = [
                self._row(row.seq_id, row.end, (drafts[row.seq_id].token_ids[-1],), row.adapter_id)
                for row in rows
                if num_drafted < requested[row.seq_id].num_draft_tokens
            ]
            rows = [row for row in rows if not self.grammars.is_finished(row.seq_id)]
        return {
            seq_id: DraftedRow(seq_id, tuple(draft.token_ids), draft.draft_probs)
            for seq_id, draft in drafts.items()
        }

    def catch_up(self, step: DraftStep) -> None:
        """Run the step's tokens that the draft model has not computed yet; call after `draft`."""
        for row in step.rows:
            self.grammars.move_to(row.seq_id, row.num_computed_tokens, row.token_ids)
        if step.rows:
            self._batch_state.update_histories(step.rows)
            self.model(self._batch_state.forward_batch(step.rows), self.kv_cache)

    def draft_ahead(
        self, step: DraftStep, is_interrupted: Callable[[], bool] = lambda: False
    ) -> AheadOutput:
        """Draft for the outcomes of the step's `ahead` rows; call after `draft` and `catch_up`.

        is_interrupted: whether another step has arrived, which ends the drafts. It may differ on
        the ranks; they agree on it.
        """
        return self._ahead.draft(step.step_id, step.ahead, is_interrupted)

    def warm_up(self, num_tokens: int) -> None:
        """Run one prefill of `num_tokens`, one draft, and one ahead.

        So the first request is not slow.

        Overwrites the first blocks of the pool, which must be unused.
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
        if not self._has_states:  # of which a branch of a tree has none
            ahead = AheadRow(-1, 0, (0,), 0, (1,), 1, num_tokens + 1)
            self.draft_ahead(DraftStep(-1, (), (), (), (), (), (ahead,)))
        self.draft(DraftStep(-1, (-1,), (), (), (), ()))

    def _row(self, seq_id: int, start: int, token_ids: tuple[int, ...], adapter_id: int) -> StepRow:
        """Build a row that runs `token_ids` and samples one token, masked by a grammar if any."""
        self.grammars.move_to(seq_id, start, token_ids)
        mask = self.grammars.mask(seq_id)
        return StepRow(seq_id, start, token_ids, 0, True, grammar_mask=mask, adapter_id=adapter_id)

    def _masked_pass(
        self, rows: Sequence[StepRow], requested: Mapping[int, DraftRow]
    ) -> _MaskedPass | None:
        """Run `rows` with masks after them; None where drafts are made token by token."""
        if self._mask_token_id is None or not rows:
            return None
        counts = [requested[row.seq_id].num_draft_tokens for row in rows]
        masked = [
            row._replace(token_ids=row.token_ids + (self._mask_token_id,) * (count - 1))
            for row, count in zip(rows, counts, strict=True)
        ]
        hidden = self.model(self._batch_state.forward_batch(masked), self.kv_cache)
        ends = list(accumulate(len(row.token_ids) for row in masked))
        places = [
            place
            for end, count in zip(ends, counts, strict=True)
            for place in range(end - count, end)
        ]
        firsts = accumulate(counts[:-1], initial=0)
        first_of = {row.seq_id: first for row, first in zip(rows, firsts, strict=True)}
        return _MaskedPass(self.model.compute_logits(hidden[places]), first_of)

    def _next_logits(self, rows: Sequence[StepRow], num_drafted: int) -> Tensor:
        """Run `rows` after `num_drafted` draft tokens, or up to the last of these.

        Returns the logits after each, [num_rows, num_tokens].
        """
        last = [end - 1 for end in accumulate(len(row.token_ids) for row in rows)]
        hidden = self.model(self._batch_state.draft_batch(rows, num_drafted), self.kv_cache)
        return self.model.compute_logits(hidden[last])

    def _extend(
        self,
        rows: Sequence[StepRow],
        logits: Tensor,  # [num_rows, num_tokens]
        spans: Sequence[TokenSpan],
        drafts: Sequence[PartialDraft],
    ) -> list[StepRow]:
        """Append a token to the drafts, which are equally long; return the rows extended.

        The drafts of the other rows have ended.
        """
        self._batch_state.update_histories(rows)
        logits = self._batch_state.logits_processor(rows).apply(logits)
        return [rows[index] for index in self._sampler.extend(logits, spans, drafts)]
