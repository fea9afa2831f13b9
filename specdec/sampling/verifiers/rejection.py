"""Rejection sampling and block verification: the output has the distribution of the target.

A draft is accepted up to a random token. The token after it is sampled from what is left of the
target's distribution, or from all of it if the whole draft is accepted. Tokens depend on the drafts
as well as on the seed; their distribution does not. A sequence without drafts samples the target's
distribution, with a separate noise stream.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.sampling.distribution import Distribution, TokenWeights
from specdec.sampling.gumbel import Stream, uniforms
from specdec.sampling.sampling_batch import SamplingBatch
from specdec.sampling.verifiers.draft_batch import DraftBatch, Int64Array, VerifiedTokens
from specdec.sampling.vocab_shard import VocabShard


def verify_rejection(
    logits: Tensor, batch: SamplingBatch, drafts: DraftBatch, shard: VocabShard
) -> VerifiedTokens:
    """Return the draft tokens before the first rejected one, and one sampled from the residual.

    Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", ICML
    2023, arXiv 2211.17192, algorithm 1; Chen et al., "Accelerating Large Language Model Decoding
    with Speculative Sampling", arXiv 2302.01318, algorithm 2. Draft token x, sampled from q, is
    accepted with probability min(1, p(x) / q(x)). The residual is max(p - q, 0), scaled to sum to
    1. Temperatures must be above 0. A collective call.
    """
    test = _AcceptanceTest(logits, batch, drafts, shard)
    is_kept = test.uniforms * test.probs_of_drafts < test.target_probs
    num_accepted = drafts.num_leading(is_kept.cpu().numpy())
    return test.verified(num_accepted, torch.ones_like(test.target.totals))


def verify_block(
    logits: Tensor, batch: SamplingBatch, drafts: DraftBatch, shard: VocabShard
) -> VerifiedTokens:
    """Return the longest accepted prefix of each draft, and one token sampled from the residual.

    Drafts are accepted jointly, so at least as many tokens as token by token: Sun et al., "Block
    Verification Accelerates Speculative Decoding", arXiv 2403.10444, algorithm 2. With p_0 = 1 and
    p_i = min(p_{i-1} * M_b(X_i) / M_s(X_i), 1) for target M_b and draft M_s after the first i - 1
    draft tokens, the first i are accepted when a uniform number is at most

        h_i = S_i / (S_i + 1 - p_i),  S_i = sum over x of max(p_i * M_b(x) - M_s(x), 0)

    after the first i, and h_i = p_i for all of them; the longest such prefix wins. The residual is
    max(p_i * M_b - M_s, 0), scaled to sum to 1. Temperatures must be above 0. A collective call.
    """
    test = _AcceptanceTest(logits, batch, drafts, shard)
    weights = prefix_weights(drafts, test.target_probs / test.probs_of_drafts)
    masses = _residual_masses(test.target, test.draft_probs, weights)
    is_accepted = test.uniforms <= _acceptance_probs(drafts, weights, masses)
    return test.verified(drafts.num_until_last(is_accepted.cpu().numpy()), weights)


class _AcceptanceTest:
    """The probabilities and uniform numbers that decide on each draft token of a batch."""

    def __init__(
        self,
        logits: Tensor,  # [num_rows, num_tokens]
        batch: SamplingBatch,
        drafts: DraftBatch,
        shard: VocabShard,
    ) -> None:
        assert (batch.params["temperature"] > 0).all(), "rows at temperature 0"
        self.target = Distribution.of_logits(logits, batch, shard)
        self.draft_probs = drafts.draft_probs()
        # Of each draft token, [num_draft_tokens] float64:
        self.target_probs = self.target.probs(drafts.rows, drafts.tokens)
        self.probs_of_drafts = drafts.probs_of_drafts(self.draft_probs)
        self._drafts, self._keys = drafts, batch.noise_keys
        self._offsets = drafts.tensor(drafts.offsets)
        keys = self._keys.of_stream(Stream.ACCEPTANCE, self._offsets)[drafts.rows]
        self.uniforms = uniforms(keys)

    def verified(self, num_accepted: Int64Array, scales: Tensor) -> VerifiedTokens:
        """Return the accepted tokens [num_sequences], and one sampled after them.

        Its distribution is max(p - q / scale, 0), scaled to sum to 1, or p after a whole draft,
        with p, q and scale of the token's row; scales: [num_rows] float64.
        """
        drafts, draft_probs = self._drafts, self.draft_probs
        rows = drafts.tensor(drafts.starts + num_accepted)
        sequences = torch.full((drafts.num_rows,), -1, device=rows.device)
        sequences[rows] = torch.arange(len(rows), device=rows.device)
        sampled = sequences[draft_probs.rows]
        is_rejected = sampled >= 0
        rejected_rows = draft_probs.rows[is_rejected]
        weights = TokenWeights(
            sampled[is_rejected],
            draft_probs.token_ids[is_rejected],
            draft_probs.weights[is_rejected] / scales[rejected_rows],
        )
        keys = self._keys.of_stream(Stream.RECOVERY, self._offsets)[rows]
        last = self.target.sample_residual(rows, weights, keys)
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
