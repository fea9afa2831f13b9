"""What tokens are drawn from, as numbers: for verifiers, and for drafts whose chances they need.

A rank holds the probabilities of its own tokens. Ranks exchange a few numbers a row, never a slice
of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.distributed.group import TensorParallelGroup
from specdec.sampling.chunks import ScoreChunks
from specdec.sampling.gumbel import CHUNK_TOKENS, NoiseKeys, uniforms
from specdec.sampling.sampler import SamplingBatch, draw
from specdec.sampling.truncation import support_floors

_ROWS_PER_SLAB = 64


@dataclass(frozen=True)
class VocabShard:
    """The tokens from `first_token` on that this rank of a group holds logits for.

    Columns of logits beyond vocab_size are padding. A higher rank has higher tokens.
    """

    group: TensorParallelGroup
    first_token: int
    vocab_size: int


@dataclass(frozen=True)
class TokenWeights:
    """Weights of some tokens in some rows; a token comes once a row, and weighs more than 0."""

    rows: Tensor  # [num_entries] int64
    token_ids: Tensor  # [num_entries] int64
    weights: Tensor  # [num_entries] float64


@dataclass(frozen=True)
class ListedTokens:
    """The most likely tokens of each row, best first, and how likely each is among them."""

    token_ids: Tensor  # [num_rows, count] int64
    probs: Tensor  # [num_rows, count] float32, each row sums to 1 but for rounding

    def draw(self, keys: NoiseKeys) -> Tensor:
        """One token a row, [num_rows] int64, by inversion of exactly these probabilities."""
        reached = self.probs.double().cumsum(1)
        targets = uniforms(keys) * reached[:, -1]
        places = (reached <= targets.unsqueeze(1)).sum(1, keepdim=True)
        return self.token_ids.gather(1, places).squeeze(1)


@dataclass(frozen=True)
class Distribution:
    """Probabilities after temperature, min_p, top_k and top_p: exp(score) / total of the row.

    Scores are relative to the best one of the row on any rank, and -inf where the cut was made. A
    row without any score has no probabilities: all are 0.
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
        """A collective call. Greedy rows get the distribution of temperature 1, uncut."""
        scores = _scaled_scores(logits, _temperatures(batch, logits.device), shard)
        floors = scores.maxima.new_full((batch.num_rows,), -torch.inf)
        if len(batch.sampled_rows):
            sampled = scores if not len(batch.greedy_rows) else scores.take(batch.sampled_rows)
            floors[batch.sampled_rows] = support_floors(sampled, batch.truncation, shard.group)
            scores.cut(floors)
        return cls(scores, _totals(scores, shard), shard)

    def own_probs(self, rows: Tensor, token_ids: Tensor) -> Tensor:
        """The probability of each token in its row, and 0 for a token that another rank holds.

        rows, token_ids: [n] int64. Returns [n] float64.
        """
        masses = self._masses(self.scores, rows, token_ids)
        return masses / self.totals[rows]

    def probs(self, rows: Tensor, token_ids: Tensor) -> Tensor:
        """The same with all ranks' tokens; a collective call."""
        return self.shard.group.all_reduce(self.own_probs(rows, token_ids))

    def entropies(self) -> Tensor:
        """In nats, [num_rows] float64; a collective call."""
        sums = _sums(self.scores, lambda scores: torch.special.entr(scores.exp()))
        return self.totals.log() + self.shard.group.all_reduce(sums) / self.totals

    def best(self, count: int) -> ListedTokens:
        """The `count` most likely tokens of each row, or all of them; a collective call.

        Where fewer are possible the rest are any tokens, of probability 0. A row that has no
        probabilities gets a token that is certain.
        """
        count = min(count, self.shard.vocab_size)
        masses, token_ids = self._own_best(count)
        masses = self.shard.group.all_gather(masses).movedim(0, 1).flatten(1)
        token_ids = self.shard.group.all_gather(token_ids).movedim(0, 1).flatten(1)
        masses, places = masses.topk(count)
        masses[:, 0].clamp_(min=torch.finfo(masses.dtype).tiny)
        probs = masses / masses.sum(1, keepdim=True)
        # What fills up a row may be padding behind the vocabulary.
        token_ids = token_ids.gather(1, places).clamp_(max=self.shard.vocab_size - 1)
        return ListedTokens(token_ids, probs.float())

    def draw_residual(
        self,
        rows: Tensor,  # [num_drawn] int64
        weights: TokenWeights,
        keys: NoiseKeys,
    ) -> Tensor:
        """Samples max(p - weight, 0) of each of `rows`, scaled to sum to 1; [num_drawn] int64.

        p is the distribution of the row. weights, keys: of the drawn rows, in their order. Where
        nothing is left, as rounding may have it, p itself is sampled. Only the weighted tokens
        differ from p, so this costs what sampling does. A collective call.
        """
        residual = self.scores.take(rows)
        self._subtract(residual, rows, weights)
        maxima = residual.scores.amax(2)
        peaks = self.shard.group.all_gather(maxima.amax(1)).amax(0)
        is_empty = peaks == -torch.inf
        if is_empty.any():
            residual.scores[is_empty] = self.scores.scores[rows[is_empty]]
            maxima[is_empty] = self.scores.maxima[rows[is_empty]]
            peaks[is_empty] = 0
        residual.scores.sub_(peaks.view(-1, 1, 1))
        residual = replace(residual, maxima=maxima.sub_(peaks.unsqueeze(1)))
        floors = torch.full_like(peaks, -torch.inf)
        return draw(residual, floors, keys, self.shard.group, self.shard.vocab_size)

    def _subtract(self, residual: ScoreChunks, rows: Tensor, weights: TokenWeights) -> None:
        """Takes weights off the probabilities behind `residual`, in place; not off its maxima."""
        masses = self._masses(residual, weights.rows, weights.token_ids)
        left = masses - weights.weights * self.totals[rows][weights.rows]
        columns, is_near = self._columns(weights.token_ids)
        flat = residual.scores.flatten(1)
        flat[weights.rows[is_near], columns[is_near]] = left[is_near].clamp(min=0).log().float()

    def _masses(self, scores: ScoreChunks, rows: Tensor, token_ids: Tensor) -> Tensor:
        columns, is_near = self._columns(token_ids)
        found = scores.scores.flatten(1)[rows, columns].double().exp_()
        return found.masked_fill_(~is_near, 0)

    def _columns(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Where tokens are in flat scores, and whether they are there at all."""
        columns = token_ids - self.scores.first_chunk * CHUNK_TOKENS
        num_columns = self.scores.maxima.shape[1] * CHUNK_TOKENS
        is_near = (columns >= 0) & (columns < num_columns)
        return columns.clamp(0, num_columns - 1), is_near

    def _own_best(self, count: int) -> tuple[Tensor, Tensor]:
        """exp(score) and id of this rank's best tokens, [num_rows, count] each, padded with 0."""
        # The best `count` tokens are in the `count` chunks with the best maxima.
        num_columns = self.scores.maxima.shape[1]
        columns = self.scores.maxima.topk(min(count, num_columns)).indices
        rows = torch.arange(len(columns), device=columns.device).unsqueeze(1)
        near = self.scores.scores[rows, columns].flatten(1)
        best, places = near.topk(min(count, near.shape[1]))
        chunks = columns.gather(1, places // CHUNK_TOKENS) + self.scores.first_chunk
        token_ids = chunks * CHUNK_TOKENS + places % CHUNK_TOKENS
        padding = (0, count - best.shape[1])
        return pad(best.double().exp_(), padding), pad(token_ids, padding)


def highest_probs(logits: Tensor, shard: VocabShard) -> Tensor:
    """Of each row of softmax(logits) [num_rows, num_tokens], [num_rows] float64.

    Bit for bit the same on every rank, so that ranks may decide by it. A collective call.
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
    """Multiplies the temperatures of the chosen sampled rows by 1 - their highest probability.

    That is the highest of softmax(logits / temperature). A collective call.
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
    # The best score is 0, so a row that has any reaches 1.
    return shard.group.all_reduce(_sums(scores, torch.exp)).clamp_(min=1)


def _sums(scores: ScoreChunks, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Of a function of this rank's scores, [num_rows] float64; a slab at a time for memory."""
    slabs = scores.scores.split(_ROWS_PER_SLAB)
    return torch.cat([function(slab).sum((1, 2), dtype=torch.float64) for slab in slabs])
