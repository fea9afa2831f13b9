"""Lossy verifiers: a draft token is kept if a probability of it suffices.

p is the distribution that tokens are sampled from; at temperature 0 that of temperature 1 without
truncation, since otherwise only the best token would suffice. A token that the target samples
itself is always kept. The verifiers return the draft tokens before the first one that is not kept,
and the target's coupled token after them; all are collective calls.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.sampling.distribution import Distribution
from specdec.sampling.sampler import sample
from specdec.sampling.sampling_batch import SamplingBatch
from specdec.sampling.verifiers.coupled import verify_equal
from specdec.sampling.verifiers.draft_batch import DraftBatch, VerifiedTokens
from specdec.sampling.vocab_shard import VocabShard


def verify_typical(
    logits: Tensor, batch: SamplingBatch, drafts: DraftBatch, shard: VocabShard
) -> VerifiedTokens:
    """Keep a draft token unless its probability is low for the entropy.

    Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
    arXiv 2401.10774, section 2.3.1: token x is kept while p(x) > min(epsilon, delta * exp(-H(p))),
    with the entropy H in nats: the higher the entropy, the lower the probability that suffices.
    """
    target = Distribution.of_logits(logits, batch, shard)
    epsilon = drafts.per_sequence([draft.verifier.epsilon for draft in drafts.drafts])
    delta = drafts.per_sequence([draft.verifier.delta for draft in drafts.drafts])
    entropies = target.entropies()[drafts.rows[:, :-1]]
    is_kept = _target_probs(target, drafts) > torch.minimum(epsilon, delta * (-entropies).exp())
    return _verified(logits, batch, drafts, shard, is_kept)


def verify_threshold(
    logits: Tensor, batch: SamplingBatch, drafts: DraftBatch, shard: VocabShard
) -> VerifiedTokens:
    """Keep a draft token if its probability is above 0 and reaches the verifier's threshold."""
    probs = _target_probs(Distribution.of_logits(logits, batch, shard), drafts)
    is_kept = (probs >= _thresholds(drafts)) & (probs > 0)
    return _verified(logits, batch, drafts, shard, is_kept)


def verify_confidence(
    logits: Tensor, batch: SamplingBatch, drafts: DraftBatch, shard: VocabShard
) -> VerifiedTokens:
    """Keep a draft token if the *draft's* probability of it reaches the verifier's threshold.

    The target's probability only has to be above 0, so that truncation, bad words and other rules
    of the request hold. A draft without probabilities, such as a lookup's, has no confidence: of
    its tokens those are kept that the target samples itself.
    """
    is_possible = _target_probs(Distribution.of_logits(logits, batch, shard), drafts) > 0
    is_known = drafts.per_sequence([each.probs is not None for each in drafts.drafts])
    confidences = drafts.probs * is_known
    is_kept = (confidences >= _thresholds(drafts)) & (confidences > 0) & is_possible
    return _verified(logits, batch, drafts, shard, is_kept)


def _target_probs(target: Distribution, drafts: DraftBatch) -> Tensor:
    return target.probs(drafts.rows[:, :-1], drafts.token_ids)


def _thresholds(drafts: DraftBatch) -> Tensor:
    return drafts.per_sequence([draft.verifier.threshold for draft in drafts.drafts])


def _verified(
    logits: Tensor, batch: SamplingBatch, drafts: DraftBatch, shard: VocabShard, is_kept: Tensor
) -> VerifiedTokens:
    """Return the draft tokens that are kept, [B, N] bool, or sampled, and the coupled one after.

    A kept token takes the place of the sampled one. By lists: for a few tokens they are faster than
    operators.
    """
    tokens, start = sample(logits, batch, shard).tolist(), 0
    for draft, kept in zip(drafts.drafts, is_kept.tolist(), strict=True):
        for place, token in enumerate(draft.token_ids):
            if kept[place]:
                tokens[start + place] = token
        start += len(draft.token_ids) + 1
    return verify_equal(tokens, [(draft.token_ids, None, -1) for draft in drafts.drafts])
