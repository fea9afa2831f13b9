"""One rank of a draft model: extends sequences by a few tokens each, with its own KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.loading import Decoder
from specdec.sampling.distribution import Distribution, highest_probs, scale_by_confidence
from specdec.sampling.gumbel import Stream
from specdec.sampling.sampler import SamplingBatch, sample
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
from specdec.worker.batch_state import TokenSpan
from specdec.worker.draft_grammars import DraftGrammars
from specdec.worker.model_runner import ModelRunner
from specdec.worker.vocab_remap import SharedTokenMask, VocabRemap

MAX_DRAFT_CANDIDATES = 256
"""Number of most likely tokens that a draft token with probabilities is sampled from."""


@dataclass
class _PartialDraft:
    """The draft of one sequence so far, with its distributions if the verifier needs them."""

    token_ids: list[int] = field(default_factory=list)
    candidates: list[DraftProbs] = field(default_factory=list)  # [1, num_candidates] each

    def append(self, token_id: int, candidates: DraftProbs | None) -> None:
        self.token_ids.append(token_id)
        if candidates is not None:
            self.candidates.append(candidates)

    def finished(self, seq_id: int) -> DraftedRow:
        if not self.candidates:
            return DraftedRow(seq_id, tuple(self.token_ids))
        probs = np.concatenate([each.probs for each in self.candidates])
        token_ids = np.concatenate([each.token_ids for each in self.candidates])
        width = int((probs > 0).any(0).sum())  # the most likely come first
        draft_probs = DraftProbs(token_ids[:, :width], probs[:, :width])
        return DraftedRow(seq_id, tuple(self.token_ids), draft_probs)


@dataclass(frozen=True)
class _MaskedPass:
    """Logits of all places of the drafts of one step.

    first_of: the row of the first place of each sequence.
    """

    logits: Tensor  # [sum of num_draft_tokens, num_tokens]
    first_of: Mapping[int, int]

    def at(self, rows: Sequence[StepRow], num_drafted: int) -> Tensor:
        """Return the logits behind `num_drafted` draft tokens of each row, [num_rows, num_tokens].

        The result is a copy.
        """
        return self.logits[[self.first_of[row.seq_id] + num_drafted for row in rows]]


_Sampled = tuple[list[int], DraftProbs | None]
"""A token for each row, and the distributions that they were sampled from, if needed."""

_Sampler = Callable[[Tensor, SamplingBatch, int], _Sampled]
"""Function of logits [num_rows, num_tokens], the sampling batch, and the length of the drafts."""


class DraftModelRunner(ModelRunner):
    """Executes draft steps in order; with several ranks each gets the same steps.

    For most verifiers a draft token is sampled with the noise that the target will use
    (`specdec.sampling.verifiers`), so an accurate draft is accepted at any temperature. For
    verifiers that need draft probabilities it is sampled from the MAX_DRAFT_CANDIDATES most likely
    tokens, with a separate noise stream, and sent with their probabilities: verification is exact
    for the truncated distribution that the token was sampled from.

    A draft ends early if no next token is likely enough. This is evaluated before sampling, from
    the distribution, so it depends on the earlier tokens of the draft only, and every sampled token
    is verified. (Dropping unlikely tokens after sampling would change the distribution that
    verification assumes.) The proof of block verification also holds for every draft whose length
    is determined by the tokens before its end.

    With a mask token one forward pass makes a whole draft (PARD, An et al. 2025, arXiv 2504.18583,
    section 3): masks stand for the draft tokens before the last, so place i is sampled from the
    model's distribution given the text and i masks. It does not depend on earlier draft tokens.
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
        mask_token_id: int | None = None,
    ) -> None:
        """Allocate the KV pool.

        vocabulary: map between the tokens of draft and target, if their vocabularies differ.
        confidence_threshold: minimum probability, at temperature 1, of the most likely token; below
            it a draft ends, unless the sequence's rules have another one.
        mask_token_id: of a model that drafts in parallel; None to draft token by token.
        """
        super().__init__(
            model, group, num_blocks=num_blocks, block_size=block_size, vocab_size=vocab_size
        )
        self.grammars = grammars
        self._confidence_threshold = confidence_threshold
        self._mask_token_id = mask_token_id
        self._vocab_remap: VocabRemap | None = None
        self._shared_token_mask: SharedTokenMask | None = None
        device = self.kv_cache.device
        if vocabulary is not None and vocabulary.has_equal_ids:
            self._shared_token_mask = SharedTokenMask(vocabulary, model.vocab_slice, device)
        elif vocabulary is not None:
            self._vocab_remap = VocabRemap(vocabulary, group, device)

    def draft(self, step: DraftStep) -> DraftOutput:
        """Apply the step's updates and return its drafts, the same on every rank."""
        self._batch_state.update(step)
        self.grammars.update(step)
        drafts = {row.seq_id: _PartialDraft() for row in step.drafts}
        rows = [
            self._row(row.seq_id, row.num_computed_tokens, row.token_ids) for row in step.drafts
        ]
        requested = {row.seq_id: row for row in step.drafts}
        masked = self._masked_pass(rows, requested)
        num_drafted = 0
        while rows:
            logits = masked.at(rows, num_drafted) if masked else self._next_logits(rows)
            spans = [
                TokenSpan(row.seq_id, requested[row.seq_id].first_index + num_drafted)
                for row in rows
            ]
            rows = self._extend(rows, logits, spans, [drafts[row.seq_id] for row in rows])
            num_drafted += 1
            rows = [
                self._row(row.seq_id, row.end, (drafts[row.seq_id].token_ids[-1],))
                for row in rows
                if num_drafted < requested[row.seq_id].num_draft_tokens
            ]
            rows = [row for row in rows if not self.grammars.is_finished(row.seq_id)]
        return DraftOutput(
            step.step_id, tuple(draft.finished(seq_id) for seq_id, draft in drafts.items())
        )

    def catch_up(self, step: DraftStep) -> None:
        """Run the step's tokens that the draft model has not computed yet; call after `draft`."""
        for row in step.rows:
            self.grammars.move_to(row.seq_id, row.num_computed_tokens, row.token_ids)
        if step.rows:
            self._batch_state.update_histories(step.rows)
            self.model(self._batch_state.model_input(step.rows), self.kv_cache)

    def warm_up(self, num_tokens: int) -> None:
        """Run one prefill of `num_tokens` and one draft, so that the first request is not slow.

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
        self.draft(DraftStep(-1, (-1,), (), (), (), ()))

    def _row(self, seq_id: int, start: int, token_ids: tuple[int, ...]) -> StepRow:
        """Build a row that runs `token_ids` and samples one token, masked by a grammar if any."""
        self.grammars.move_to(seq_id, start, token_ids)
        mask = self.grammars.mask(seq_id)
        return StepRow(seq_id, start, token_ids, 0, True, grammar_mask=mask)

    def _masked_pass(
        self, rows: Sequence[StepRow], requested: Mapping[int, DraftRow]
    ) -> _MaskedPass | None:
        """Run `rows` with masks behind them; None where drafts are made token by token."""
        if self._mask_token_id is None or not rows:
            return None
        counts = [requested[row.seq_id].num_draft_tokens for row in rows]
        masked = [
            row._replace(token_ids=row.token_ids + (self._mask_token_id,) * (count - 1))
            for row, count in zip(rows, counts, strict=True)
        ]
        hidden = self.model(self._batch_state.model_input(masked), self.kv_cache)
        ends = list(accumulate(len(row.token_ids) for row in masked))
        places = [
            place
            for end, count in zip(ends, counts, strict=True)
            for place in range(end - count, end)
        ]
        firsts = accumulate(counts[:-1], initial=0)
        first_of = {row.seq_id: first for row, first in zip(rows, firsts, strict=True)}
        return _MaskedPass(self.model.compute_logits(hidden[places]), first_of)

    def _next_logits(self, rows: Sequence[StepRow]) -> Tensor:
        """Run `rows`; return the logits behind each, [num_rows, num_tokens]."""
        last = [end - 1 for end in accumulate(len(row.token_ids) for row in rows)]
        hidden = self.model(self._batch_state.model_input(rows), self.kv_cache)
        return self.model.compute_logits(hidden[last])

    def _extend(
        self,
        rows: Sequence[StepRow],
        logits: Tensor,  # [num_rows, num_tokens]
        spans: Sequence[TokenSpan],
        drafts: Sequence[_PartialDraft],
    ) -> list[StepRow]:
        """Append a token to the drafts, which are equally long; return the rows extended.

        The drafts of the other rows have ended.
        """
        self._batch_state.update_histories(rows)
        logits = self._batch_state.logits_processor(rows).apply(logits)
        if self._shared_token_mask is not None:
            logits = self._shared_token_mask.apply(logits)
        confident = self._confident_rows(rows, logits)
        members_of: dict[_Sampler, list[int]] = {}
        for index in confident:
            members_of.setdefault(self._sampler(rows[index]), []).append(index)
        for sampler, members in members_of.items():
            own = logits if len(members) == len(rows) else logits[members]
            batch = self._sampling_batch(own, [spans[member] for member in members])
            num_drafted = len(drafts[members[0]].token_ids)
            token_ids, probs = sampler(own, batch, num_drafted)
            for index, member in enumerate(members):
                candidates = None if probs is None else probs[index : index + 1]
                drafts[member].append(token_ids[index], candidates)
        return [rows[index] for index in confident]

    def _confident_rows(self, rows: Sequence[StepRow], logits: Tensor) -> list[int]:
        """Return the indices of `rows` whose logits reach their confidence threshold.

        logits: [num_rows, num_tokens].
        """
        thresholds = [self._threshold(row.seq_id) for row in rows]
        if not any(thresholds):
            return list(range(len(logits)))
        limits = torch.tensor(thresholds, dtype=torch.float64, device=logits.device)
        is_confident = highest_probs(logits, self._shard) >= limits
        indices: list[int] = is_confident.nonzero().flatten().tolist()
        return indices

    def _threshold(self, seq_id: int) -> float:
        own = self._batch_state.rules(seq_id).draft_confidence_threshold
        return self._confidence_threshold if own is None else own

    def _sampler(self, row: StepRow) -> _Sampler:
        """Return how to sample a row.

        Drafts of another vocabulary are sent without distributions, as if each token had
        probability 1. Verification is still exact, since its acceptance test uses a separate noise
        stream. Their confidences are sent, except those of a text that is encoded again.
        """
        rules = self._batch_state.rules(row.seq_id)
        if self._vocab_remap is not None and drafts_text(rules):
            return self._sample_coupled
        if rules.needs_confidences:
            return self._sample_with_confidences
        if self._vocab_remap is not None:
            return self._sample_remapped
        return self._sample_candidates if rules.needs_draft_probs else self._sample_coupled

    def _sampling_batch(self, logits: Tensor, spans: Sequence[TokenSpan]) -> SamplingBatch:
        """Build the sampling batch of `spans`, with scaled temperatures where the rules ask."""
        batch = self._batch_state.sampling_batch(spans)
        rules = [self._batch_state.rules(span.seq_id) for span in spans]
        is_scaled = [each.scale_draft_temperature for each in rules if each.temperature > 0]
        if not any(is_scaled):
            return batch
        chosen = torch.tensor(is_scaled, device=logits.device)
        return scale_by_confidence(logits, batch, chosen, self._shard)

    def _sample_coupled(self, logits: Tensor, batch: SamplingBatch, num_drafted: int) -> _Sampled:
        """Sample with the noise that the target uses."""
        del num_drafted
        return sample(logits, batch, self._shard).tolist(), None

    def _sample_remapped(self, logits: Tensor, batch: SamplingBatch, num_drafted: int) -> _Sampled:
        """Sample from the tokens shared with the target, with the noise of the target's ids."""
        del num_drafted
        remap = self._vocab_remap
        assert remap is not None, "a vocabulary map is needed"
        sampled = sample(remap.apply(logits), batch, remap.shard)
        return remap.draft_ids[sampled].tolist(), None

    def _sample_with_confidences(
        self, logits: Tensor, batch: SamplingBatch, num_drafted: int
    ) -> _Sampled:
        """Sample with the target's noise, and return the probability of each sampled token."""
        del num_drafted
        shard, remap = self._shard, self._vocab_remap
        if remap is not None:
            logits, shard = remap.apply(logits), remap.shard
        distribution = Distribution.of_logits(logits, batch, shard)
        sampled = sample(logits, batch, shard)
        rows = torch.arange(len(sampled), device=sampled.device)
        probs = distribution.probs(rows, sampled).cpu().numpy().astype(np.float32)
        token_ids = sampled.cpu().numpy().astype(np.int32)
        if self._shared_token_mask is not None:
            token_ids = self._shared_token_mask.target_ids(token_ids)
        own = sampled if remap is None else remap.draft_ids[sampled]
        return own.tolist(), DraftProbs(token_ids[:, None], probs[:, None])

    def _sample_candidates(
        self, logits: Tensor, batch: SamplingBatch, num_drafted: int
    ) -> _Sampled:
        """Sample from the most likely tokens with a separate noise stream.

        Also return their probabilities, by the target's token ids.
        """
        top = Distribution.of_logits(logits, batch, self._shard).top(MAX_DRAFT_CANDIDATES)
        offsets = torch.full_like(batch.noise_keys.positions, num_drafted)
        sampled = top.sample(batch.noise_keys.of_stream(Stream.DRAFT, offsets))
        token_ids = top.token_ids.cpu().numpy().astype(np.int32)
        if self._shared_token_mask is not None:
            token_ids = self._shared_token_mask.target_ids(token_ids)
        return sampled.tolist(), DraftProbs(token_ids, top.probs.cpu().numpy())
