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

from specdec.sampling.sampler import SamplingBatch, sample
from specdec.sampling.verifiers.draft_batch import DraftBatch, VerifiedTokens
from specdec.sampling.vocab_shard import VocabShard


def verify_coupled(
    logits: Tensor,  # [num_rows, num_tokens]
    batch: SamplingBatch,
    drafts: DraftBatch,
    shard: VocabShard,
    is_kept: Tensor | None = None,  # [num_draft_tokens] bool
) -> VerifiedTokens:
    """Return the longest prefix of each draft that the target samples too, and its next token.

    The draft tokens of `is_kept` are accepted too. A collective call, like every verifier.
    """
    sampled = sample(logits, batch, shard).cpu().numpy()
    if not len(drafts.token_ids):
        return VerifiedTokens.without_drafts(sampled)
    is_accepted = sampled[drafts.is_drafted] == drafts.token_ids
    if is_kept is not None:
        is_accepted |= is_kept.cpu().numpy()
    num_accepted = drafts.num_leading(is_accepted)
    return drafts.verified(num_accepted, sampled[drafts.starts + num_accepted])


def verify_greedy(best: Sequence[int], drafts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the draft tokens of each sequence that are the argmax, and the argmax after them.

    At temperature 0 all lossless verifiers are equivalent to this one.

    best: [sum of len(draft) + 1], the argmax after the base token and after each draft token.
    """
    verified, start = [], 0
    for draft in drafts:
        last = start
        for token in draft:
            if token != best[last]:
                break
            last += 1
        verified.append(tuple(best[start : last + 1]))
        start += len(draft) + 1
    return verified
