"""Block verification: accepts a draft jointly, so at least as many tokens as token by token.

Sun et al., "Block Verification Accelerates Speculative Decoding", arXiv 2403.10444, algorithm 2.
With p_0 = 1 and p_i = min(p_{i-1} * M_b(X_i) / M_s(X_i), 1) for target M_b and draft M_s after
the first i - 1 draft tokens, the first i are accepted when a uniform number is at most

    h_i = S_i / (S_i + 1 - p_i),  S_i = sum over x of max(p_i * M_b(x) - M_s(x), 0)

after the first i, and h_i = p_i for all of them; the longest such prefix wins. The next token is
drawn from max(p_i * M_b - M_s, 0), scaled to sum to 1. As with `rejection`, tokens depend on the
drafts as well as on the seed; their distribution does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.sampling import Distribution, SamplingBatch, VocabShard
from specdec.sampling.distribution import TokenWeights
from specdec.sampling.verifiers.draft_batch import DraftBatch, VerifiedTokens
from specdec.sampling.verifiers.rejection import acceptance_uniforms, sample_last_tokens


def verify_block(
    logits: Tensor,  # [num_rows, num_tokens]
    batch: SamplingBatch,
    drafts: DraftBatch,
    shard: VocabShard,
) -> VerifiedTokens:
    """Return the longest accepted prefix of each draft, and one token sampled from the residual.

    Temperatures must be above 0. A collective call.
    """
    assert len(batch.sampled_rows) == drafts.num_rows, "rows at temperature 0"
    target = Distribution.of_logits(logits, batch, shard)
    draft_probs = drafts.draft_probs()
    ratios = target.probs(drafts.rows, drafts.tokens) / drafts.probs_of_drafts(draft_probs)
    weights = prefix_weights(drafts, ratios)
    masses = _residual_masses(target, draft_probs, weights)
    acceptance_probs = _acceptance_probs(drafts, weights, masses)
    is_accepted = acceptance_uniforms(batch.noise_keys, drafts) <= acceptance_probs
    num_accepted = drafts.num_until_last(is_accepted.cpu().numpy())
    last = sample_last_tokens(target, batch.noise_keys, drafts, num_accepted, draft_probs, weights)
    return drafts.verified(num_accepted, last.cpu().numpy())


def prefix_weights(drafts: DraftBatch, ratios: Tensor) -> Tensor:
    """Return p_i of each sequence for i from 0 on, [num_rows] float64.

    ratios: [num_draft_tokens] float64. With c_i the sum of the first i logarithms of ratios, the
    recurrence is equivalent to log p_i = c_i - max(0, c_1, ..., c_i).
    """
    rows, offsets = drafts.rows + 1, drafts.tensor(drafts.offsets)
    sequences = drafts.tensor(drafts.sequences)
    # [num_sequences, max rows of a sequence]: the steps of each sequence, from the left
    steps = ratios.new_zeros(len(drafts.drafts), int(drafts.num_drafted.max()) + 1)
    steps[sequences[rows], offsets[rows]] = ratios.log()
    sums = steps.cumsum(1)
    return (sums - sums.cummax(1).values).exp()[sequences, offsets]


def _residual_masses(target: Distribution, draft_probs: TokenWeights, weights: Tensor) -> Tensor:
    """Return S_i of each row that has a draft token, [num_rows] float64; a collective call.

    For tokens that the draft cannot sample the summand is p_i * M_b(x), so S_i is p_i less the sum
    of min(p_i * M_b(x), M_s(x)) over the tokens that the draft can sample.
    """
    probs = target.own_probs(draft_probs.rows, draft_probs.token_ids)
    shared = torch.minimum(probs * weights[draft_probs.rows], draft_probs.weights)
    totals = torch.zeros_like(weights).index_add_(0, draft_probs.rows, shared)
    return (weights - target.shard.group.all_reduce(totals)).clamp_(min=0)


def _acceptance_probs(drafts: DraftBatch, weights: Tensor, masses: Tensor) -> Tensor:
    """Return h_i of the prefix that ends in each draft token, [num_draft_tokens] float64."""
    ends = drafts.rows + 1  # the row after a draft token has p_i and S_i of its prefix
    weights, masses = weights[ends], masses[ends]
    probs = masses / (masses + 1 - weights).clamp(min=torch.finfo(torch.float64).tiny)
    return torch.where(drafts.is_last, weights, probs)
