"""Selection of a draft model's tokens, as the verifiers of the sequences need them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specdec.sampling.device.device_children import DeviceChildren
from specdec.sampling.distribution import Distribution, highest_probs, scale_by_confidence
from specdec.sampling.gumbel import Stream
from specdec.sampling.sampler import sample
from specdec.sampling.sampling_batch import SamplingBatch
from specdec.sampling.top_children import best_children_of
from specdec.sampling.vocab_shard import VocabShard
from specdec.text.vocab_map import VocabularyMap, drafts_text
from specdec.types.messages import DraftProbs
from specdec.types.sampling.sampling_spec import SamplingRules
from specdec.worker.batch.batch_state import BatchState, TokenSpan
from specdec.worker.batch.vocab_remap import SharedTokenMask, VocabRemap

MAX_DRAFT_CANDIDATES = 256
"""Number of most likely tokens that a draft token with probabilities is sampled from."""


@dataclass
class PartialDraft:
    """The draft of one sequence so far, with its distributions if the verifier needs them."""

    token_ids: list[int] = field(default_factory=list)
    candidates: list[DraftProbs] = field(default_factory=list)  # [1, num_candidates] each

    def append(self, token_id: int, candidates: DraftProbs | None) -> None:
        """Append a token; candidates: that it was sampled from."""
        self.token_ids.append(token_id)
        if candidates is not None:
            self.candidates.append(candidates)

    @property
    def draft_probs(self) -> DraftProbs | None:
        """The distributions of all tokens; None where the verifier needs none."""
        if not self.candidates:
            return None
        probs = np.concatenate([each.probs for each in self.candidates])
        token_ids = np.concatenate([each.token_ids for each in self.candidates])
        width = int((probs > 0).any(0).sum())  # the most likely come first
        return DraftProbs(token_ids[:, :width], probs[:, :width])


_Sampled = tuple[list[int], DraftProbs | None]
"""A token for each row, and the distributions that they were sampled from, if needed."""

_Sampler = Callable[[Tensor, SamplingBatch, int], _Sampled]
"""Function of logits [num_rows, num_tokens], the sampling batch, and the length of the drafts."""


class DraftSampler:
    """Samples draft tokens from shaped logits, equally on all ranks; its calls are collective.

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
    """

    def __init__(
        self,
        batch_state: BatchState,
        shard: VocabShard,
        tokens: range,
        device: torch.device,
        vocabulary: VocabularyMap | None,
        confidence_threshold: float,
    ) -> None:
        """shard: of the draft's vocabulary; `tokens` are those whose logits this rank computes.

        vocabulary: as in DraftModelRunner. confidence_threshold: minimum probability, at
        temperature 1, of the most likely token; below it a draft ends, unless the sequence's rules
        have another one.
        """
        self._batch_state = batch_state
        self._shard = shard
        self._confidence_threshold = confidence_threshold
        self._vocab_remap: VocabRemap | None = None
        self._shared_token_mask: SharedTokenMask | None = None
        if vocabulary is not None and vocabulary.has_equal_ids:
            self._shared_token_mask = SharedTokenMask(vocabulary, tokens, device)
        elif vocabulary is not None:
            self._vocab_remap = VocabRemap(vocabulary, shard.group, device, shard.ops)

    def extend(
        self,
        logits: Tensor,  # [num_rows, num_tokens], shaped
        spans: Sequence[TokenSpan],
        drafts: Sequence[PartialDraft],
    ) -> list[int]:
        """Append a token to the drafts, which are equally long; return the indices of those.

        The other drafts have ended. spans: the place of each token.
        """
        logits = self._without_missing(logits)
        confident = self._confident_rows(spans, logits)
        members_of: dict[_Sampler, list[int]] = {}
        for index in confident:
            members_of.setdefault(self._sampler(spans[index].seq_id), []).append(index)
        for sampler, members in members_of.items():
            own = logits if len(members) == len(spans) else logits[members]
            batch = self._sampling_batch(own, [spans[member] for member in members])
            num_drafted = len(drafts[members[0]].token_ids)
            token_ids, probs = sampler(own, batch, num_drafted)
            for index, member in enumerate(members):
                candidates = None if probs is None else probs[index : index + 1]
                drafts[member].append(token_ids[index], candidates)
        return confident

    def is_plain(self, seq_id: int) -> bool:
        """Return whether drafts are what the target would sample from the draft model's own logits.

        Each token, with the target's noise: no other vocabulary, threshold, temperature or
        probability, and no counts of tokens, from which those of rejected drafts would be taken.
        """
        rules = self._batch_state.rules(seq_id)
        is_scaled = rules.scale_draft_temperature and rules.temperature > 0
        has_vocabulary = self._vocab_remap is not None or self._shared_token_mask is not None
        needs_more = rules.needs_draft_probs or rules.needs_confidences or rules.needs_tokens
        return not (is_scaled or has_vocabulary or needs_more or self._threshold(rules))

    def likeliest(
        self,
        logits: Tensor,  # [num_rows, num_tokens], shaped
        spans: Sequence[TokenSpan],
        count: int,
    ) -> list[list[int]]:
        """Return up to `count` tokens that the target is most likely to put at each place.

        With the noise that the target will use these are the largest perturbed scores; where a
        verifier samples with other noise, the most probable tokens.
        """
        logits, shard = self._without_missing(logits), self._shard
        if self._vocab_remap is not None:
            logits, shard = self._vocab_remap.apply(logits), self._vocab_remap.shard
        batch = self._batch_state.sampling_batch(spans)
        is_coupled = [not self._rules(span).needs_draft_probs for span in spans]
        temperatures = np.where(is_coupled, batch.params["temperature"], 0).astype(np.float32)
        batch = batch.with_temperatures(temperatures)
        children = best_children_of(logits, batch, count, shard, on_host=True)
        found = DeviceChildren(*(column.cpu() for column in children))
        return [self._draft_ids(found.of(row)[0]) for row in range(len(spans))]

    def _draft_ids(self, token_ids: list[int]) -> list[int]:
        if self._vocab_remap is None or not token_ids:
            return token_ids
        own: list[int] = self._vocab_remap.draft_ids[token_ids].tolist()
        return own

    def _without_missing(self, logits: Tensor) -> Tensor:
        """Exclude tokens that the target lacks, where ids are equal."""
        return logits if self._shared_token_mask is None else self._shared_token_mask.apply(logits)

    def _rules(self, span: TokenSpan) -> SamplingRules:
        return self._batch_state.rules(span.seq_id)

    def _confident_rows(self, spans: Sequence[TokenSpan], logits: Tensor) -> list[int]:
        """Return the indices of places whose logits reach the confidence threshold.

        logits: [num_rows, num_tokens].
        """
        thresholds = [self._threshold(self._rules(span)) for span in spans]
        if not any(thresholds):
            return list(range(len(logits)))
        limits = torch.tensor(thresholds, dtype=torch.float64, device=logits.device)
        is_confident = highest_probs(logits, self._shard) >= limits
        indices: list[int] = is_confident.nonzero().flatten().tolist()
        return indices

    def _threshold(self, rules: SamplingRules) -> float:
        own = rules.draft_confidence_threshold
        return self._confidence_threshold if own is None else own

    def _sampler(self, seq_id: int) -> _Sampler:
        """Return how to sample the tokens of a sequence.

        Drafts of another vocabulary are sent without distributions, as if each token had
        probability 1. Verification is still exact, since its acceptance test uses a separate noise
        stream. Their confidences are sent, except those of a text that is encoded again.
        """
        rules = self._batch_state.rules(seq_id)
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
        rules = [self._rules(span) for span in spans]
        is_scaled = [each.scale_draft_temperature and each.temperature > 0 for each in rules]
        if not any(is_scaled):
            return batch
        return scale_by_confidence(logits, batch, np.flatnonzero(is_scaled), self._shard)

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
