"""The best children of nodes of draft trees, over all shards of the vocabulary.

A child's rank is that of log q, or above temperature 0 of log q + g with the noise g that the
target will use, and its confidence follows from these scores (`specdec.sampling.tree_growth`). As
in `specdec.sampling.sampler`, noise is computed only for the chunks of the vocabulary that can hold
one of the best.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.reference.sample_rows import SampleParams
from specdec.kernels.sample import best_drafts
from specdec.sampling.gumbel import (
    CHUNK_TOKENS,
    MAX_NOISE,
    MIN_NOISE,
    NoiseKeys,
    gumbel_noise,
    largest_noise,
)
from specdec.sampling.sampler import SamplingBatch
from specdec.sampling.tree_growth import Children, Floats
from specdec.sampling.truncation import truncation_floors
from specdec.sampling.vocab_shard import ScoreChunks, VocabShard

_ROUNDING = 1e-3
"""Above the float32 rounding error of scores and noise."""

NUM_WEIGHED = 32
"""Best tokens over which the confidences of a node's possible children sum to 1."""

_LOWEST = torch.finfo(torch.float64).min


def best_by_logits(logits: Tensor, count: int, shard: VocabShard) -> Children:
    """Return the `count` tokens with the largest logits, with their probabilities.

    logits: [num_rows, num_tokens], of this rank, without NaN. A collective call.
    """
    own = logits[:, : shard.vocab_size - shard.first_token].float()
    values, token_ids = own.topk(min(count, own.shape[1]))
    totals = own.logsumexp(1, keepdim=True).double()
    best = _best_of_ranks(values.double(), token_ids + shard.first_token, count, shard)
    totals = shard.group.all_gather(totals).logsumexp(0)
    confidences = confidences_of_logits(torch.from_numpy(best.confidences), totals.cpu())
    return Children(best.token_ids, confidences.numpy())


def best_by_noise(logits: Tensor, batch: SamplingBatch, count: int, shard: VocabShard) -> Children:
    """Return the `count` tokens of each row that the noise favors most, the sampled one first.

    Their confidences are those of `confidences_of_scores`. A collective call.

    logits: [num_rows, num_tokens], of this rank. batch: of these rows, with temperatures above 0.
    """
    own = logits[:, : shard.vocab_size - shard.first_token]
    chunks = ScoreChunks.of_logits(own, shard.first_token)
    chunks.scale(batch.temperatures, shard.group)
    chunks.mask_below(truncation_floors(chunks, batch.truncation, shard.group))
    most = max(count, NUM_WEIGHED)
    scores, token_ids = _perturbed_best(chunks, batch.noise_keys, most)
    best = _best_of_ranks(scores.double(), token_ids, most, shard)
    return _weighed(best, batch.params["temperature"].astype(np.float64), count)


def best_drafts_by_noise(
    logits: Tensor, target_ids: Tensor, params: SampleParams, count: int, shard: VocabShard
) -> Children | None:
    """Return the children as `best_by_noise` does, by a kernel on CPUs; None without it.

    With several ranks top_k, top_p and min_p must be off. Rounding may decide. A collective call.

    logits: [num_rows, n], of this rank's draft tokens. target_ids: the target's ids of these, [n]
    int32, ascending. params: of the rows, with temperatures above 0.
    """
    most = max(count, NUM_WEIGHED)
    found = best_drafts(logits, target_ids, params, most)
    if found is None:
        return None
    scores, token_ids = found
    best = _best_of_ranks(scores.double(), token_ids, most, shard)
    return _weighed(best, params["temperature"].astype(np.float64), count)


def _weighed(best: Children, temperatures: Floats, count: int) -> Children:
    """Return the first `count` of the best tokens; the confidences of `best` are their scores.

    temperatures: of the rows.
    """
    found = confidences_of_scores(*map(torch.from_numpy, (best.confidences, temperatures)))
    return Children(best.token_ids[:, :count], found.numpy()[:, :count])


def confidences_of_scores(best: Tensor, temperatures: Tensor) -> Tensor:
    """Return the probability that each token is the target's, given the noise, [num_rows, n].

    The target takes the argmax of y / T + g; the draft knows g, and its logits z in place of y. If
    y - z is Gumbel noise of scale 1, the probability is softmax(z + T g), by the Gumbel-max trick
    (Maddison et al. 2014, arXiv 1411.0030, section 2). At a low temperature this is the softmax of
    the logits, as at temperature 0; at a high one the shared noise decides.

    best: z / T + g of the best tokens, up to a constant, [num_rows, n] float64, descending; -inf
    for no token, which gets 0. temperatures: T of each row, [num_rows] float64, above 0.
    """
    differences = best - best[:, :1].clamp_min(_LOWEST)
    weights = (differences * temperatures[:, None]).exp()
    confidences: Tensor = weights / weights.sum(1, keepdim=True).clamp_min(1)
    return confidences


def confidences_of_logits(best: Tensor, totals: Tensor) -> Tensor:
    """Return the probabilities of the best tokens of rows without noise, [num_rows, n] float64.

    best: their logits, [num_rows, n] float64. totals: logarithms of the sums of all tokens'
    weights, [num_rows, 1] float64.
    """
    return (best - totals.clamp_min(_LOWEST)).clamp_max(0).exp()


def _best_of_ranks(scores: Tensor, token_ids: Tensor, count: int, shard: VocabShard) -> Children:
    """Return the best tokens of all ranks, with scores as confidences; lower ids before higher.

    scores: [num_rows, n] float64, of this rank's best, and their ids.
    """
    missing = count - scores.shape[1]
    scores = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
    token_ids = torch.nn.functional.pad(token_ids, (0, missing))
    columns = torch.stack([scores, token_ids.double()], dim=1)  # float64 holds ids exactly
    ranks = shard.group.all_gather(columns).permute(1, 2, 0, 3).flatten(2).cpu().numpy()
    order = np.lexsort((ranks[:, 1], -ranks[:, 0]))[:, :count]
    best, ids = (np.take_along_axis(ranks[:, column], order, axis=1) for column in (0, 1))
    return Children(ids.astype(np.int64), best)


def _perturbed_best(chunks: ScoreChunks, keys: NoiseKeys, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest perturbed scores of each row and their token ids, [num_rows, n] each.

    n: `count`, or less where few tokens of this rank can be among the best; -inf for no token.
    """
    rows, columns = _chunks_of_best(chunks, keys, count)
    chunk_ids = chunks.first_chunk + columns
    perturbed = chunks.scores[rows, columns] + gumbel_noise(keys[rows], chunk_ids)
    counts = rows.bincount(minlength=len(keys))
    places = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    shape = (len(keys), max(1, int(counts.max())))
    scores = perturbed.new_full((*shape, CHUNK_TOKENS), -torch.inf)
    scores[rows, places] = perturbed
    first_tokens = chunk_ids.new_zeros(shape)
    first_tokens[rows, places] = chunk_ids * CHUNK_TOKENS
    flat = scores.flatten(1)
    best, offsets = flat.topk(min(count, flat.shape[1]))
    starts = first_tokens.gather(1, offsets // CHUNK_TOKENS)
    return best, starts + offsets % CHUNK_TOKENS


def _chunks_of_best(chunks: ScoreChunks, keys: NoiseKeys, count: int) -> tuple[Tensor, Tensor]:
    """Return rows and columns of the chunks that can hold one of a row's `count` best tokens.

    The best tokens of chunks, with the least noise, or the tokens with the largest noise of their
    chunk: `count` of either kind are at least as good as the last one of the best.
    """
    limits = _least_of_best(chunks.maxima, count) + MIN_NOISE - MAX_NOISE - _ROUNDING
    is_open = (chunks.maxima >= limits) & (chunks.maxima > -torch.inf)
    rows, columns = is_open.nonzero().unbind(1)
    largest = largest_noise(keys[rows], chunks.first_chunk + columns)
    reached = torch.full_like(chunks.maxima, -torch.inf)
    reached[rows, columns] = chunks.scores[rows, columns, largest.offsets] + largest.noise
    least = _least_of_best(reached, count)[rows, 0] - _ROUNDING
    chosen = chunks.maxima[rows, columns] + largest.noise >= least
    return rows[chosen], columns[chosen]


def _least_of_best(values: Tensor, count: int) -> Tensor:
    """Return the `count`-th largest value of each row, [num_rows, 1]; -inf where it has fewer."""
    if values.shape[1] < count:
        return values.new_full((len(values), 1), -torch.inf)
    return values.topk(count).values[:, -1:]
