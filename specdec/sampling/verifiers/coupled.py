"""Coupled verification: a draft token is accepted when the target draws the same one anyway.

Every output token is defined by the target's scores and by Gumbel noise that draft and target share
(`specdec.sampling`), so a draft changes when tokens come, never which. Daliri, Musco and Suresh,
"Coupling without Communication and Drafter-Invariant Speculative Decoding", arXiv 2408.07978: with
total variation TV between the two distributions, a draft that is drawn with the same noise is
accepted with a probability of at least (1 - TV) / (1 + TV).
"""

from __future__ import annotations

from torch import Tensor

from specdec.sampling import SamplingBatch, VocabShard, sample
from specdec.sampling.verifiers.draft_batch import DraftBatch, VerifiedTokens


def verify_coupled(
    logits: Tensor,  # [num_rows, num_tokens]
    batch: SamplingBatch,
    drafts: DraftBatch,
    shard: VocabShard,
) -> VerifiedTokens:
    """The longest prefix of each draft that the target draws too, and the target's token after it.

    A collective call, as that of every verifier.
    """
    return longest_prefix(logits, batch, drafts, shard)


def longest_prefix(
    logits: Tensor,  # [num_rows, num_tokens]
    batch: SamplingBatch,
    drafts: DraftBatch,
    shard: VocabShard,
    is_kept: Tensor | None = None,  # [num_draft_tokens] bool
) -> VerifiedTokens:
    """The same, with a draft token also accepted where `is_kept` says so; a collective call."""
    drawn = sample(logits, batch, shard.group, shard.first_token, shard.vocab_size)
    sampled = drawn.cpu().numpy()
    if not len(drafts.token_ids):
        return VerifiedTokens.without_drafts(sampled)
    is_accepted = sampled[drafts.is_drafted] == drafts.token_ids
    if is_kept is not None:
        is_accepted |= is_kept.cpu().numpy()
    num_accepted = drafts.num_leading(is_accepted)
    return drafts.verified(num_accepted, sampled[drafts.starts + num_accepted])
