"""Probabilities that tokens are sampled from, for verifiers and for drafts that carry them.

A rank holds the probabilities of the tokens of its vocabulary shard. Ranks exchange a few numbers
for each row, never a slice of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.sampling.gumbel import CHUNK_TOKENS, NoiseKeys, uniforms
from specdec.sampling.sampler import SamplingBatch, sample_scores
from specdec.sampling.truncation import truncation_floors
from specdec.sampling.vocab_shard import ScoreChunks, VocabShard

_ROWS_PER_SLAB = 64


@dataclass(frozen=True)
class TokenWeights:
    """Sparse token weights above 0, as coordinates; a token occurs at most once in a row."""

    rows: Tensor  # [num_entries] int64
    token_ids: Tensor  # [num_entries] int64
    weights: Tensor  # [num_entries] float64


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

    scores: ScoreChunks
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
        scores = _scaled_scores(logits, _temperatures(batch, logits.device), shard)
        floors = scores.maxima.new_full((batch.num_rows,), -torch.inf)
        if len(batch.sampled_rows):
            sampled = scores if not len(batch.greedy_rows) else scores.take(batch.sampled_rows)
            floors[batch.sampled_rows] = truncation_floors(sampled, batch.truncation, shard.group)
            scores.mask_below(floors)
        return cls(scores, _totals(scores, shard), shard)

    def own_probs(self, rows: Tensor, token_ids: Tensor) -> Tensor:
        """Return the probability of each token in its row; 0 for a token of another rank.

        rows, token_ids: [n] int64. Returns [n] float64.
        """
        masses = self._masses(self.scores, rows, token_ids)
        return masses / self.totals[rows]

    def probs(self, rows: Tensor, token_ids: Tensor) -> Tensor:
        """Return the probability of each token in its row, [n] float64; a collective call."""
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
        # Tokens that fill up a row may be padding columns beyond the vocabulary.
        token_ids = token_ids.gather(1, indices).clamp_(max=self.shard.vocab_size - 1)
        return TopTokens(token_ids, probs.float())

    def sample_residual(
        self,
        rows: Tensor,  # [num_rows] int64
        weights: TokenWeights,
        keys: NoiseKeys,
    ) -> Tensor:
        """Sample max(p - weight, 0), scaled to sum to 1, of each of `rows`; return [num_rows].

        p is the distribution of the row. weights, keys: of the sampled rows, in their order. If
        rounding leaves no mass, p itself is sampled. Only the weighted tokens differ from p, so the
        cost is that of sampling. A collective call.
        """
        residual = self.scores.take(rows)
        self._subtract(residual, rows, weights)
        maxima = residual.scores.amax(2)
        row_maxima = self.shard.group.all_gather(maxima.amax(1)).amax(0)
        is_empty = row_maxima == -torch.inf
        if is_empty.any():
            residual.scores[is_empty] = self.scores.scores[rows[is_empty]]
            maxima[is_empty] = self.scores.maxima[rows[is_empty]]
            row_maxima[is_empty] = 0
        residual.scores.sub_(row_maxima.view(-1, 1, 1))
        residual = replace(residual, maxima=maxima.sub_(row_maxima.unsqueeze(1)))
        floors = torch.full_like(row_maxima, -torch.inf)
        return sample_scores(residual, floors, keys, self.shard)

    def _subtract(self, residual: ScoreChunks, rows: Tensor, weights: TokenWeights) -> None:
        """Subtract weights from the probabilities of `residual`, in place; its maxima stay."""
        masses = self._masses(residual, weights.rows, weights.token_ids)
        left = masses - weights.weights * self.totals[rows][weights.rows]
        columns, is_held = self._columns(weights.token_ids)
        flat = residual.scores.flatten(1)
        flat[weights.rows[is_held], columns[is_held]] = left[is_held].clamp(min=0).log().float()

    def _masses(self, scores: ScoreChunks, rows: Tensor, token_ids: Tensor) -> Tensor:
        columns, is_held = self._columns(token_ids)
        found = scores.scores.flatten(1)[rows, columns].double().exp_()
        return found.masked_fill_(~is_held, 0)

    def _columns(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the columns of tokens in the flat scores, and whether this rank holds them."""
        columns = token_ids - self.scores.first_chunk * CHUNK_TOKENS
        num_columns = self.scores.maxima.shape[1] * CHUNK_TOKENS
        is_held = (columns >= 0) & (columns < num_columns)
        return columns.clamp(0, num_columns - 1), is_held

    def _own_top(self, count: int) -> tuple[Tensor, Tensor]:
        """Return exp(score) and id of this rank's best tokens, [num_rows, count], padded with 0."""
        # The best `count` tokens are in the `count` chunks with the best maxima.
        num_columns = self.scores.maxima.shape[1]
        columns = self.scores.maxima.topk(min(count, num_columns)).indices
        rows = torch.arange(len(columns), device=columns.device).unsqueeze(1)
        candidates = self.scores.scores[rows, columns].flatten(1)
        best, indices = candidates.topk(min(count, candidates.shape[1]))
        chunks = columns.gather(1, indices // CHUNK_TOKENS) + self.scores.first_chunk
        token_ids = chunks * CHUNK_TOKENS + indices % CHUNK_TOKENS
        padding = (0, count - best.shape[1])
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
    chosen: Tensor,  # [num_sampled] bool
    shard: VocabShard,
) -> SamplingBatch:
    """Multiply the temperatures of the chosen sampled rows by 1 - their highest probability.

    The probability is that of softmax(logits / temperature). A collective call.
    """
    rows, temperatures = batch.sampled_rows[chosen], batch.temperatures[chosen]
    totals = _totals(_scaled_scores(logits[rows], temperatures, shard), shard)
    scaled = (temperatures * (1 - 1 / totals)).float()
    least = torch.finfo(torch.float32).tiny
    return batch.with_temperatures(
        batch.temperatures.masked_scatter(chosen, scaled.clamp(min=least))
    )


def _scaled_scores(logits: Tensor, temperatures: Tensor, shard: VocabShard) -> ScoreChunks:
    held = logits[:, : shard.vocab_size - shard.first_token]
    scores = ScoreChunks.of_logits(held, shard.first_token)
    scores.scale(temperatures, shard.group)
    return scores


def _temperatures(batch: SamplingBatch, device: torch.device) -> Tensor:
    temperatures = torch.ones(batch.num_rows, dtype=torch.float32, device=device)
    return temperatures.index_copy_(0, batch.sampled_rows, batch.temperatures)


def _totals(scores: ScoreChunks, shard: VocabShard) -> Tensor:
    # The best score of a row is 0, so the total is at least 1 unless the row is empty.
    return shard.group.all_reduce(_sums(scores, torch.exp)).clamp_(min=1)


def _sums(scores: ScoreChunks, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Sum a function of this rank's scores by row, [num_rows] float64; in slabs, to save memory."""
    slabs = scores.scores.split(_ROWS_PER_SLAB)
    return torch.cat([function(slab).sum((1, 2), dtype=torch.float64) for slab in slabs])
