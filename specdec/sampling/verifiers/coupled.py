"""Coupled verification: a draft token is accepted if the target samples the same token.

Every output token is a function of the target's scores and of Gumbel noise that draft and target
share (`specdec.sampling`), so a draft changes when tokens are output, never which. Daliri, Musco
and Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding", arXiv
2408.07978: with total variation TV between the two distributions, a draft token sampled with the
same noise is accepted with a probability of at least (1 - TV) / (1 + TV).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

from torch import Tensor

from specdec.sampling.sampler import sample
from specdec.sampling.sampling_batch import SamplingBatch
from specdec.sampling.verifiers.draft_batch import Draft, DraftBatch, VerifiedTokens
from specdec.sampling.vocab_shard import VocabShard
from specdec.types.drafts.draft_tree import Parents, walk


def verify_coupled(
    logits: Tensor,  # [num_rows, num_tokens]
    batch: SamplingBatch,
    drafts: DraftBatch,
    shard: VocabShard,
    is_kept: Tensor | None = None,  # [num_draft_tokens] bool
) -> VerifiedTokens:
    """Return the longest prefix of each draft that the target samples too, and its next token.

    In a tree of drafts that is a walk from the base to the child that the target samples, and on
    from there. The noise of a token depends on its position alone, so the walk yields the tokens of
    no speculation whatever the tree. The draft tokens of `is_kept` are accepted too; they are of
    chains. A collective call, like every verifier.
    """
    sampled = sample(logits, batch, shard).cpu().numpy()
    if not len(drafts.token_ids):
        return VerifiedTokens.without_drafts(sampled)
    if any(draft.parents is not None for draft in drafts.drafts):
        assert is_kept is None, "a lossy verifier keeps drafts of chains only"
        return _walked(sampled.tolist(), drafts.drafts)
    is_accepted = sampled[drafts.is_drafted] == drafts.token_ids
    if is_kept is not None:
        is_accepted |= is_kept.cpu().numpy()
    num_accepted = drafts.num_leading(is_accepted)
    return drafts.verified(num_accepted, sampled[drafts.starts + num_accepted])


def verify_greedy(
    best: Sequence[int],
    drafts: Sequence[Sequence[int]],
    trees: Sequence[Parents | None] | None = None,
) -> list[tuple[int, ...]]:
    """Return the draft tokens of each sequence that are the argmax, and the argmax after them.

    At temperature 0 all lossless verifiers are equivalent to this one.

    best: [sum of len(draft) + 1], the argmax after the base token and after each draft token.
    trees: the parents of each sequence's drafts, None for a chain; None for chains only.
    """
    verified, start = [], 0
    for draft, parents in zip(drafts, trees or repeat(None, len(drafts)), strict=True):
        if parents is not None:
            own = best[start : start + len(draft) + 1]
            verified.append(walk(own, draft, parents))
            start += len(draft) + 1
            continue
        last = start
        for token in draft:
            if token != best[last]:
                break
            last += 1
        verified.append(tuple(best[start : last + 1]))
        start += len(draft) + 1
    return verified


def _walked(sampled: Sequence[int], drafts: Sequence[Draft]) -> VerifiedTokens:
    """Verify drafts of which some are trees; sampled: [num_rows], for each row of logits."""
    token_ids, trees = [each.token_ids for each in drafts], [each.parents for each in drafts]
    return VerifiedTokens.of(verify_greedy(sampled, token_ids, trees))
