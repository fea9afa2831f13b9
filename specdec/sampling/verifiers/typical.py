"""Typical acceptance: a draft token is kept while it is not surprising. Lossy.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
arXiv 2401.10774, section 2.3.1: token x is kept while p(x) > min(epsilon, delta * exp(-H(p))),
with the entropy H in nats: where the target is unsure, unlikely tokens will do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.sampling import Distribution, SamplingBatch, VocabShard
from specdec.sampling.verifiers.coupled import longest_prefix
from specdec.sampling.verifiers.draft_batch import DraftBatch, VerifiedTokens


def verify_typical(
    logits: Tensor,  # [num_rows, num_tokens]
    batch: SamplingBatch,
    drafts: DraftBatch,
    shard: VocabShard,
) -> VerifiedTokens:
    """The draft tokens before the first surprising one, and the target's coupled token after them.

    p is what tokens are sampled from; at temperature 0 it is that of temperature 1, uncut, as else
    all but the best token would surprise. A token that the target draws itself is kept whatever its
    probability, since it would come anyway. A collective call.
    """
    target = Distribution.of_logits(logits, batch, shard)
    epsilon = drafts.of_each([draft.verifier.epsilon for draft in drafts.drafts])
    delta = drafts.of_each([draft.verifier.delta for draft in drafts.drafts])
    limits = torch.minimum(epsilon, delta * (-target.entropies()[drafts.rows]).exp())
    is_kept = target.probs(drafts.rows, drafts.tokens) > limits
    return longest_prefix(logits, batch, drafts, shard, is_kept)
