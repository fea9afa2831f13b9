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
from specdec.sampling.sampling_batch import SamplingBatch
from specdec.sampling.verifiers.coupled import verify_coupled
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
    epsilon = drafts.per_draft_token([draft.verifier.epsilon for draft in drafts.drafts])
    delta = drafts.per_draft_token([draft.verifier.delta for draft in drafts.drafts])
    limits = torch.minimum(epsilon, delta * (-target.entropies()[drafts.rows]).exp())
    is_kept = target.probs(drafts.rows, drafts.tokens) > limits
    return verify_coupled(logits, batch, drafts, shard, is_kept)


def verify_threshold(
    logits: Tensor, batch: SamplingBatch, drafts: DraftBatch, shard: VocabShard
) -> VerifiedTokens:
    """Keep a draft token if its probability is above 0 and reaches the verifier's threshold."""
    target = Distribution.of_logits(logits, batch, shard)
    probs = target.probs(drafts.rows, drafts.tokens)
    limits = drafts.per_draft_token([draft.verifier.threshold for draft in drafts.drafts])
    return verify_coupled(logits, batch, drafts, shard, (probs >= limits) & (probs > 0))


def verify_confidence(
    logits: Tensor, batch: SamplingBatch, drafts: DraftBatch, shard: VocabShard
) -> VerifiedTokens:
    """Keep a draft token if the *draft's* probability of it reaches the verifier's threshold.

    The target's probability only has to be above 0, so that truncation, bad words and other rules
    of the request hold. A draft without probabilities, such as a lookup's, has no confidence: of
    its tokens those are kept that the target samples itself.
    """
    target = Distribution.of_logits(logits, batch, shard)
    is_possible = target.probs(drafts.rows, drafts.tokens) > 0
    limits = drafts.per_draft_token([draft.verifier.threshold for draft in drafts.drafts])
    confidences = drafts.confidences()
    is_kept = (confidences >= limits) & (confidences > 0) & is_possible
    return verify_coupled(logits, batch, drafts, shard, is_kept)
