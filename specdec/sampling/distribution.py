"""Probabilities that tokens are sampled from, for verifiers and for drafts that carry them.

A rank holds the probabilities of the tokens of its vocabulary shard. Ranks exchange a few numbers
for each row, and whole rows where some are truncated, or sampled from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from specdec.sampling.device.device_sampler import slabs_of
from specdec.sampling.gumbel import NoiseKeys, uniforms
from specdec.sampling.row_exchange import exchanged_rows
from specdec.sampling.sampler import sample_scores
from specdec.sampling.sampling_batch import SamplingBatch
from specdec.sampling.truncation import scaled_scores, truncation_floors
from specdec.sampling.vocab_shard import VocabShard

_ROWS_PER_SLAB = 64


@dataclass(frozen=True)
class TopTokens:
    """The most likely tokens of each row, best first, with their renormalized probabilities."""

    token_ids: Tensor  # [num_rows, count] int64
    probs: Tensor  # [num_rows, count] float32, each row sums to 1 but for rounding

    def sample(self, keys: NoiseKeys) -> Tensor:
        """Sample one token for each row by inverse transform; return [num_rows] int64."""
        cumulative = self.probs.double().cumsum(1)
        targets = uniforms(keys) * cumulative[:, -1]
        indices = (cumulative <= targets.unsqueeze(1)).sum(1, keepdim=True)
        return self.token_ids.gather(1, indices).squeeze(1)


@dataclass(frozen=True)
class Distribution:
    """Probabilities after temperature, min_p, top_k and top_p: exp(score) / total of the row.

    Scores are relative to the best score of the row on any rank, and -inf for truncated tokens. In
    a row without a finite score all probabilities are 0.
    """

    scores: Tensor  # [num_rows, num_tokens] float32, of this rank
    totals: Tensor  # [num_rows] float64, the sum of exp(scores) over all ranks, or 1
    shard: VocabShard

    @classmethod
    def of_logits(
        cls,
        logits: Tensor,  # [num_rows, num_tokens]
        batch: SamplingBatch,
        shard: VocabShard,
    ) -> Distribution:
        """Compute the distributions; a collective call.

        Greedy rows get the distribution of temperature 1, without truncation.
        """
        temperatures = batch.rules.temperatures
        temperatures = temperatures.masked_fill(temperatures == 0, 1)
        scores = _scaled_scores(logits, temperatures, shard)
        if batch.rules.truncates:
            scores.masked_fill_(scores < _floors(scores, batch, shard), -torch.inf)
        return cls(scores, _totals(scores, shard), shard)

    def own_probs(self, rows: Tensor, token_ids: Tensor) -> Tensor:
        """Return the probability of each token in its row; 0 for a token of another rank.

        rows, token_ids: int64, broadcast together. Returns float64 of their shape.
        """
        columns, is_held = self._columns(token_ids)
        masses = self.scores[rows, columns].double().exp_()
        return masses.masked_fill_(~is_held, 0) / self.totals[rows]

    def probs(self, rows: Tensor, token_ids: Tensor) -> Tensor:
        """Return the probability of each token in its row; a collective call.

        Arguments as in `own_probs`.
        """
        return self.shard.group.all_reduce(self.own_probs(rows, token_ids))

    def entropies(self) -> Tensor:
        """Return the entropies in nats, [num_rows] float64; a collective call."""
        sums = _sums(self.scores, lambda scores: torch.special.entr(scores.exp()))
        return self.totals.log() + self.shard.group.all_reduce(sums) / self.totals

    def top(self, count: int) -> TopTokens:
        """Return the `count` most likely tokens of each row, or all; a collective call.

        A row with fewer possible tokens is filled with arbitrary tokens of probability 0. A row
        without probabilities gets one token of probability 1.
        """
        count = min(count, self.shard.vocab_size)
        masses, token_ids = self._own_top(count)
        masses = self.shard.group.all_gather(masses).movedim(0, 1).flatten(1)
        token_ids = self.shard.group.all_gather(token_ids).movedim(0, 1).flatten(1)
        masses, indices = masses.topk(count)
        masses[:, 0].clamp_(min=torch.finfo(masses.dtype).tiny)
        probs = masses / masses.sum(1, keepdim=True)
        return TopTokens(token_ids.gather(1, indices), probs.float())

    def sample_residual(
        self,
        rows: Tensor,  # [num_rows] int64
        token_ids: Tensor,  # [num_rows, count] int64
        weights: Tensor,  # [num_rows, count] float64
        keys: NoiseKeys,
    ) -> Tensor:
        """Sample max(p - weight, 0), scaled to sum to 1, of each of `rows`; return [num_rows].

        p is the distribution of the row. token_ids, weights, keys: of the sampled rows, in their
        order; a token has one weight above 0 at most. If rounding leaves no mass, p itself is
        sampled. Only the weighted tokens differ from p, so the cost is that of sampling. A
        collective call.
        """
        scores, totals = self.scores[rows], self.totals[rows, None]
        columns, is_held = self._columns(token_ids)
        left = scores.gather(1, columns).double().exp_() - weights * totals
        left = left.clamp_(min=0).log().masked_fill_(~is_held | (weights == 0), torch.inf)
        residual = scores.scatter_reduce(1, columns, left.float(), "amin")
        maxima = self.shard.group.all_gather(residual.amax(1)).amax(0)
        is_empty = maxima == -torch.inf
        residual = torch.where(is_empty[:, None], scores, residual)
        return sample_scores(residual, keys, self.shard)

    def _columns(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the columns of tokens in the scores, and whether this rank holds them."""
        columns, num_columns = token_ids - self.shard.first_token, self.scores.shape[1]
        is_held = (columns >= 0) & (columns < num_columns)
        return columns.clamp(0, num_columns - 1), is_held

    def _own_top(self, count: int) -> tuple[Tensor, Tensor]:
        """Return exp(score) and id of this rank's best tokens, [num_rows, count], padded with 0."""
        best, indices = self.scores.topk(min(count, self.scores.shape[1]))
        padding = (0, count - best.shape[1])
        token_ids = indices + self.shard.first_token
        return pad(best.double().exp_(), padding), pad(token_ids, padding)


def highest_probs(logits: Tensor, shard: VocabShard) -> Tensor:
    """Return the highest probability of each row of softmax(logits), [num_rows] float64.

    logits: [num_rows, num_tokens]. The result is bit-identical on every rank, so that all ranks
    take the same decision. A collective call.
    """
    ones = torch.ones(len(logits), dtype=torch.float32, device=logits.device)
    scores = _scaled_scores(logits, ones, shard)
    totals = shard.group.all_gather(_sums(scores, torch.exp)).sum(0)
    return 1 / totals.clamp_(min=1)  # the best score is 0


def scale_by_confidence(
    logits: Tensor,  # [num_rows, num_tokens]
    batch: SamplingBatch,
    chosen: NDArray[np.int64],
    shard: VocabShard,
) -> SamplingBatch:
    """Multiply the temperatures of the chosen rows by 1 - their highest probability.

    The probability is that of softmax(logits / temperature); these rows have temperatures above 0.
    A collective call.
    """
    temperatures = batch.params["temperature"].copy()
    own = torch.from_numpy(temperatures[chosen]).to(logits.device)
    rows = torch.from_numpy(chosen).to(logits.device)
    totals = _totals(_scaled_scores(logits[rows], own, shard), shard)
    scaled = (own * (1 - 1 / totals)).float().clamp(min=torch.finfo(torch.float32).tiny)
    temperatures[chosen] = scaled.cpu().numpy()
    return batch.with_temperatures(temperatures)


def _scaled_scores(logits: Tensor, temperatures: Tensor, shard: VocabShard) -> Tensor:
    held = logits[:, : shard.vocab_size - shard.first_token]
    return scaled_scores(held, temperatures, shard.group)


def _floors(scores: Tensor, batch: SamplingBatch, shard: VocabShard) -> Tensor:
    """Return the floors of the scores of all rows, [num_rows, 1] float32; a collective call.

    Greedy rows have none.
    """
    limits = batch.rules.limits

    def floors_of(whole: Tensor, own: slice) -> Tensor:
        of_own = limits[own]
        found = [
            truncation_floors(whole[slab], of_own[slab], on_host=True) for slab in slabs_of(whole)
        ]
        return torch.cat(found).view(torch.int32).long()[:, None]

    floors = exchanged_rows(scores, shard, floors_of, width=1).int().view(torch.float32)
    return floors.masked_fill(batch.rules.temperatures[:, None] == 0, -torch.inf)


def _totals(scores: Tensor, shard: VocabShard) -> Tensor:
    # The best score of a row is 0, so the total is at least 1 unless the row is empty.
    return shard.group.all_reduce(_sums(scores, torch.exp)).clamp_(min=1)


def _sums(scores: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Sum a function of this rank's scores by row, [num_rows] float64; in slabs, to save memory."""
    slabs = scores.split(_ROWS_PER_SLAB)
    return torch.cat([function(slab).sum(1, dtype=torch.float64) for slab in slabs])
