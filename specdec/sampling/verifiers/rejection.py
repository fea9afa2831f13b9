"""Rejection sampling: draft tokens are accepted at random; the output has the target distribution.

Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", ICML
2023, arXiv 2211.17192, algorithm 1; Chen et al., "Accelerating Large Language Model Decoding with
Speculative Sampling", arXiv 2302.01318, algorithm 2. Draft token x, sampled from q, is accepted
with probability min(1, p(x) / q(x)). The token after the last accepted one is sampled from the
residual max(p - q, 0), scaled to sum to 1, or from p if the whole draft is accepted.

Tokens depend on the drafts as well as on the seed; their distribution does not. A sequence without
drafts samples p, with a separate noise stream.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.sampling import Distribution, NoiseKeys, SamplingBatch, Stream, VocabShard, uniforms
from specdec.sampling.distribution import TokenWeights
from specdec.sampling.verifiers.draft_batch import DraftBatch, Int64Array, VerifiedTokens


def verify_rejection(
    logits: Tensor,  # [num_rows, num_tokens]
    batch: SamplingBatch,
    drafts: DraftBatch,
    shard: VocabShard,
) -> VerifiedTokens:
    """Return the draft tokens before the first rejected one, and one sampled from the residual.

    Temperatures must be above 0. A collective call.
    """
    assert len(batch.sampled_rows) == drafts.num_rows, "rows at temperature 0"
    target = Distribution.of_logits(logits, batch, shard)
    draft_probs = drafts.draft_probs()
    target_probs = target.probs(drafts.rows, drafts.tokens)
    uniform = acceptance_uniforms(batch.noise_keys, drafts)
    is_kept = uniform * drafts.probs_of_drafts(draft_probs) < target_probs
    num_accepted = drafts.num_leading(is_kept.cpu().numpy())
    scales = torch.ones_like(target.totals)
    last = sample_last_tokens(target, batch.noise_keys, drafts, num_accepted, draft_probs, scales)
    return drafts.verified(num_accepted, last.cpu().numpy())


def acceptance_uniforms(keys: NoiseKeys, drafts: DraftBatch) -> Tensor:
    """Return the uniform of each acceptance test, [num_draft_tokens] float64; keys: of all rows."""
    offsets = drafts.tensor(drafts.offsets)
    return uniforms(keys.of_stream(Stream.ACCEPTANCE, offsets)[drafts.rows])


def sample_last_tokens(
    target: Distribution,
    keys: NoiseKeys,
    drafts: DraftBatch,
    num_accepted: Int64Array,  # [num_sequences]
    draft_probs: TokenWeights,
    scales: Tensor,  # [num_rows] float64
) -> Tensor:
    """Sample the token of each sequence after its accepted ones; return [num_sequences] int64.

    The distribution is max(p - q / scale, 0), scaled to sum to 1, or p after a whole draft, with
    p, q and scale of the token's row.
    """
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
    offsets = drafts.tensor(drafts.offsets)
    return target.sample_residual(rows, weights, keys.of_stream(Stream.RECOVERY, offsets)[rows])
