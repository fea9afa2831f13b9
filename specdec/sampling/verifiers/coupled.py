"""Coupled verification: a draft token is accepted if the target samples the same token.

Every output token is a function of the target's scores and of Gumbel noise that draft and target
share (`specdec.sampling`), so a draft changes when tokens are output, never which. Daliri, Musco
and Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding", arXiv
2408.07978: with total variation TV between the two distributions, a draft token sampled with the
same noise is accepted with a probability of at least (1 - TV) / (1 + TV).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specdec.sampling.sampler import sample
from specdec.sampling.sampling_batch import SamplingBatch
from specdec.sampling.verifiers.draft_batch import DraftBatch, VerifiedTokens
from specdec.sampling.vocab_shard import VocabShard
from specdec.types.drafts.draft_tree import Parents, walk


def verify_coupled(
    logits: Tensor,  # [num_rows, num_tokens]
    batch: SamplingBatch,
    drafts: DraftBatch,
    shard: VocabShard,
) -> VerifiedTokens:
    """Return the longest prefix of each draft that the target samples too, and its next token.

    In a tree of drafts that is a walk from the base to the child that the target samples, and on
    from there. The noise of a token depends on its position alone, so the walk yields the tokens of
    no speculation whatever the tree. A draft with `num_kept` is accepted up to there, whatever it
    is. A collective call, like every verifier.
    """
    sampled = sample(logits, batch, shard).tolist()
    own = [(each.token_ids, each.parents, each.num_kept) for each in drafts.drafts]
    return verify_equal(sampled, own)


def verify_equal(
    sampled: Sequence[int], drafts: Sequence[tuple[Sequence[int], Parents | None, int]]
) -> VerifiedTokens:
    """Return the draft tokens of each sequence that the target samples, and the one after them.

    At temperature 0, where the samples are argmaxes, all lossless verifiers are equivalent to this.

    sampled: [sum of len(draft) + 1], the target's token after each base and each draft token.
    drafts: tokens, parents and `num_kept` of each sequence, as in Draft.
    """
    verified, start = VerifiedTokens(), 0
    for token_ids, parents, num_kept in drafts:
        if parents is not None:
            own = sampled[start : start + len(token_ids) + 1]
            verified.append(walk(own, token_ids, parents))
        else:
            last = start + max(0, num_kept)
            if num_kept < 0:
                for token in token_ids:
                    if token != sampled[last]:
                        break
                    last += 1
            verified.append((*token_ids[: last - start], sampled[last]))
        start += len(token_ids) + 1
    return verified
