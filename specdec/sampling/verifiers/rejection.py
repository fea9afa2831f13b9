"""Rejection sampling: draft tokens are kept by chance, and the output is still the target's.

Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", ICML
2023, arXiv 2211.17192, algorithm 1; Chen et al., "Accelerating Large Language Model Decoding with
Speculative Sampling", arXiv 2302.01318, algorithm 2. Draft token x, drawn from q, is kept with
probability min(1, p(x) / q(x)). The token after the last one kept is drawn from the residual
max(p - q, 0), scaled to sum to 1, or from p where no draft token is left.

Tokens depend on the drafts as well as on the seed; their distribution does not. A sequence without
drafts samples p, with noise of its own.
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
    """The draft tokens before the first that chance rejects, and one that makes up for it.

    Temperatures must be above 0. A collective call.
    """
    assert len(batch.sampled_rows) == drafts.num_rows, "rows at temperature 0"
    target = Distribution.of_logits(logits, batch, shard)
    draft_probs = drafts.draft_probs()
    chances = target.probs(drafts.rows, drafts.tokens)
    luck = acceptance_uniforms(batch.noise_keys, drafts)
    is_kept = luck * drafts.of_drafted(draft_probs) < chances
    num_accepted = drafts.num_leading(is_kept.cpu().numpy())
    scales = torch.ones_like(target.totals)
    last = draw_last(target, batch.noise_keys, drafts, num_accepted, draft_probs, scales)
    return drafts.verified(num_accepted, last.cpu().numpy())


def acceptance_uniforms(keys: NoiseKeys, drafts: DraftBatch) -> Tensor:
    """What decides about each draft token, [num_draft_tokens] float64; keys: of all rows."""
    offsets = drafts.tensor(drafts.offsets)
    return uniforms(keys.of_stream(Stream.ACCEPTANCE, offsets)[drafts.rows])


def draw_last(
    target: Distribution,
    keys: NoiseKeys,
    drafts: DraftBatch,
    num_accepted: Int64Array,  # [num_sequences]
    draft_probs: TokenWeights,
    scales: Tensor,  # [num_rows] float64
) -> Tensor:
    """The token of each sequence after its accepted ones, [num_sequences] int64.

    It comes from max(p - q / scale, 0), scaled to sum to 1, or from p after a whole draft, all of
    the row that it comes from.
    """
    rows = drafts.tensor(drafts.starts + num_accepted)
    sequences = torch.full((drafts.num_rows,), -1, device=rows.device)
    sequences[rows] = torch.arange(len(rows), device=rows.device)
    drawn = sequences[draft_probs.rows]
    is_refused = drawn >= 0
    refused_rows = draft_probs.rows[is_refused]
    weights = TokenWeights(
        drawn[is_refused],
        draft_probs.token_ids[is_refused],
        draft_probs.weights[is_refused] / scales[refused_rows],
    )
    offsets = drafts.tensor(drafts.offsets)
    return target.draw_residual(rows, weights, keys.of_stream(Stream.RECOVERY, offsets)[rows])
