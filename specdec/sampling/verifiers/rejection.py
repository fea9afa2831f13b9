"""Rejection sampling and block verification: the output has the distribution of the target.

A draft is accepted up to a random token. The token after it is sampled from what is left of the
target's distribution, or from all of it if the whole draft is accepted. Tokens depend on the drafts
as well as on the seed; their distribution does not. A sequence without drafts samples the target's
distribution, with a separate noise stream.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.sampling.distribution import Distribution
from specdec.sampling.gumbel import NoiseKeys, Stream, uniforms
from specdec.sampling.sampling_batch import SamplingBatch
from specdec.sampling.verifiers.draft_batch import DraftBatch, VerifiedTokens
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
    num_accepted = drafts.num_leading(test.uniforms * drafts.probs < test.target_probs)
    return test.verified(num_accepted, test.target_probs.new_ones(num_accepted.shape))


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
    ratios = torch.where(drafts.is_draft, test.target_probs / drafts.probs, 1)
    weights = prefix_weights(ratios)
    is_accepted = test.uniforms <= _acceptance_probs(test.target, drafts, weights)
    lengths = drafts.places[1:] * (is_accepted & drafts.is_draft)
    num_accepted = lengths.amax(1, keepdim=True)
    return test.verified(num_accepted, weights.gather(1, num_accepted))


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
        # Of each draft token, [B, N] float64:
        self.target_probs = self.target.probs(drafts.rows[:, :-1], drafts.token_ids)
        self._drafts, self._keys = drafts, batch.noise_keys
        self.uniforms = uniforms(self._keys_of(Stream.ACCEPTANCE)).view_as(drafts.rows)[:, :-1]

    def _keys_of(self, stream: Stream) -> NoiseKeys:
        """Return the keys of all rows, [B * (N + 1)]."""
        rows, places = self._drafts.rows, self._drafts.places
        return self._keys[rows.flatten()].of_stream(stream, places.repeat(len(rows)))

    def verified(self, num_accepted: Tensor, scales: Tensor) -> VerifiedTokens:
        """Return the accepted tokens, and one sampled after them; both arguments are [B, 1].

        Its distribution is max(p - q / scale, 0), scaled to sum to 1, or p after a whole draft,
        with p and q of the row after the accepted tokens.
        """
        drafts, rows = self._drafts, self._drafts.rows.gather(1, num_accepted)
        index = torch.arange(len(rows), device=rows.device), num_accepted.squeeze(1)
        keys = self._keys_of(Stream.RECOVERY)[index[0] * len(drafts.places) + index[1]]
        place = index[0], index[1].clamp_max(drafts.token_ids.shape[1] - 1)
        is_rejected = num_accepted < drafts.num_drafts
        weights = drafts.candidates.probs[place] / scales * is_rejected
        last = self.target.sample_residual(
            rows.squeeze(1), drafts.candidates.token_ids[place], weights, keys
        )
        return drafts.verified(num_accepted, last[:, None])


def prefix_weights(ratios: Tensor) -> Tensor:
    """Return p_i of each sequence for i from 0 on, [B, N + 1] float64.

    ratios: [B, N] float64. With c_i the sum of the first i logarithms of ratios, the recurrence is
    equivalent to log p_i = c_i - max(0, c_1, ..., c_i).
    """
    sums = pad(ratios.log().cumsum(1), (1, 0))
    return (sums - sums.cummax(1).values).exp()


def _acceptance_probs(target: Distribution, drafts: DraftBatch, weights: Tensor) -> Tensor:
    """Return h_i of the prefix that ends in each draft token, [B, N] float64; a collective call.

    For tokens that the draft cannot sample the summand of S_i is p_i * M_b(x), so S_i is p_i less
    the sum of min(p_i * M_b(x), M_s(x)) over the tokens that the draft can sample.
    """
    own, given = weights[:, 1:], drafts.candidates
    if own.shape[1] == 1:
        return own
    probs = target.own_probs(drafts.rows[:, 1:-1, None], given.token_ids[:, 1:])
    shared = torch.minimum(probs * own[:, :-1, None], given.probs[:, 1:]).sum(2)
    masses = own[:, :-1] - target.shard.group.all_reduce(shared)
    masses = pad(masses.clamp(min=0), (0, 1))
    probs = masses / (masses + 1 - own).clamp(min=torch.finfo(torch.float64).tiny)
    return torch.where(drafts.places[1:] == drafts.num_drafts, own, probs)
