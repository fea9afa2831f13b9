"""Threshold acceptance: a draft token is kept while the target finds it likely enough. Lossy."""

from __future__ import annotations

from torch import Tensor

from specdec.sampling import Distribution, SamplingBatch, VocabShard
from specdec.sampling.verifiers.coupled import longest_prefix
from specdec.sampling.verifiers.draft_batch import DraftBatch, VerifiedTokens


def verify_threshold(
    logits: Tensor,  # [num_rows, num_tokens]
    batch: SamplingBatch,
    drafts: DraftBatch,
    shard: VocabShard,
) -> VerifiedTokens:
    """The draft tokens of at least a probability, and the target's coupled token after them.

    Probabilities, and what is kept besides, are as in `verify_typical`; a token that cannot be
    drawn is not kept even by a threshold of 0. A collective call.
    """
    target = Distribution.of_logits(logits, batch, shard)
    probs = target.probs(drafts.rows, drafts.tokens)
    limits = drafts.of_each([draft.verifier.threshold for draft in drafts.drafts])
    return longest_prefix(logits, batch, drafts, shard, (probs >= limits) & (probs > 0))
