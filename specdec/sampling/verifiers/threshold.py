"""Threshold acceptance: keep a draft token if its target probability reaches a threshold. Lossy."""

from __future__ import annotations

from torch import Tensor

from specdec.sampling import Distribution, SamplingBatch, VocabShard
from specdec.sampling.verifiers.coupled import verify_coupled
from specdec.sampling.verifiers.draft_batch import DraftBatch, VerifiedTokens


def verify_threshold(
    logits: Tensor,  # [num_rows, num_tokens]
    batch: SamplingBatch,
    drafts: DraftBatch,
    shard: VocabShard,
) -> VerifiedTokens:
    """Return the draft tokens of at least the threshold, and the target's coupled token after them.

    Probabilities, and the other tokens that are kept, are as in `verify_typical`; a token of
    probability 0 is rejected even with a threshold of 0. A collective call.
    """
    target = Distribution.of_logits(logits, batch, shard)
    probs = target.probs(drafts.rows, drafts.tokens)
    limits = drafts.per_draft_token([draft.verifier.threshold for draft in drafts.drafts])
    return verify_coupled(logits, batch, drafts, shard, (probs >= limits) & (probs > 0))
