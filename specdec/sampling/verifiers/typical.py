"""Typical acceptance: keep a draft token unless its probability is low for the entropy. Lossy.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
arXiv 2401.10774, section 2.3.1: token x is kept while p(x) > min(epsilon, delta * exp(-H(p))),
with the entropy H in nats: the higher the entropy, the lower the probability that suffices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.sampling import Distribution, SamplingBatch, VocabShard
from specdec.sampling.verifiers.coupled import verify_coupled
from specdec.sampling.verifiers.draft_batch import DraftBatch, VerifiedTokens


def verify_typical(
    logits: Tensor,  # [num_rows, num_tokens]
    batch: SamplingBatch,
    drafts: DraftBatch,
    shard: VocabShard,
) -> VerifiedTokens:
    """Return the draft tokens before the first atypical one, and the target's coupled token.

    p is the distribution that tokens are sampled from; at temperature 0 that of temperature 1
    without truncation, since otherwise only the best token would be typical. A token that the
    target samples itself is always kept. A collective call.
    """
    target = Distribution.of_logits(logits, batch, shard)
    epsilon = drafts.per_draft_token([draft.verifier.epsilon for draft in drafts.drafts])
    delta = drafts.per_draft_token([draft.verifier.delta for draft in drafts.drafts])
    limits = torch.minimum(epsilon, delta * (-target.entropies()[drafts.rows]).exp())
    is_kept = target.probs(drafts.rows, drafts.tokens) > limits
    return verify_coupled(logits, batch, drafts, shard, is_kept)
