"""The token that each row of logits is defined to be.

That is the argmax of (logits / temperature, cut by min_p, top_k and top_p) + Gumbel noise, which is
a sample of the softmax of what the cut left (the Gumbel-max trick: Gumbel 1954; see Maddison,
Tarlow and Minka 2014, arXiv 1411.0030). At temperature 0 it is the argmax of the logits. Equal
scores go to the lowest token id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from specdec.parallel import TensorParallelGroup
from specdec.sampling.chunks import ScoreChunks, Winners
from specdec.sampling.noise import (
    CHUNK_TOKENS,
    MAX_NOISE,
    MIN_NOISE,
    NoiseKeys,
    gumbel_noise,
    largest_noise,
)
from specdec.sampling.support import Truncation, support_floors

# From so many chunks on it pays to compute first which of them can win.
_MANY_CHUNKS = 256
# More than float32 rounds off scores and noise, which are below 100 wherever it matters.
_ROUNDING = 1e-3


@dataclass(frozen=True)
class SamplingBatch:
    """How the rows of a batch are sampled. What is on the host decides which work is left out.

    temperatures, truncation and noise_keys are of the sampled rows only, in their order.
    """

    num_rows: int
    greedy_rows: Tensor  # [num_greedy] int64
    sampled_rows: Tensor  # [num_sampled] int64
    temperatures: Tensor  # [num_sampled] float32, above 0
    truncation: Truncation
    noise_keys: NoiseKeys

    @classmethod
    def from_lists(
        cls,
        *,
        temperatures: Sequence[float],
        top_k: Sequence[int],
        top_p: Sequence[float],
        min_p: Sequence[float],
        seeds: Sequence[int],
        choices: Sequence[int],
        positions: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> SamplingBatch:
        """One entry for each row of logits; the fields are those of SamplingParams.

        positions: the index of the token to come among the output tokens of its choice.
        """
        greedy = [row for row, temperature in enumerate(temperatures) if temperature == 0]
        sampled = [row for row, temperature in enumerate(temperatures) if temperature != 0]
        of_sampled = partial(_values_at, sampled, device)
        # A temperature that float32 would round to 0 must not become a division by 0.
        least = torch.finfo(torch.float32).tiny
        return cls(
            num_rows=len(temperatures),
            greedy_rows=torch.tensor(greedy, dtype=torch.int64, device=device),
            sampled_rows=torch.tensor(sampled, dtype=torch.int64, device=device),
            temperatures=of_sampled(temperatures, torch.float32).clamp(min=least),
            truncation=Truncation.from_lists(
                [top_k[row] for row in sampled],
                [top_p[row] for row in sampled],
                [min_p[row] for row in sampled],
                device,
            ),
            noise_keys=NoiseKeys(of_sampled(seeds), of_sampled(choices), of_sampled(positions)),
        )

    @classmethod
    def greedy(cls, num_rows: int, device: torch.device) -> SamplingBatch:
        """Rows that are not sampled: the likeliest token of each."""
        zeros, nothing = [0] * num_rows, [0.0] * num_rows
        return cls.from_lists(
            temperatures=nothing,
            top_k=zeros,
            top_p=nothing,
            min_p=nothing,
            seeds=zeros,
            choices=zeros,
            positions=zeros,
            device=device,
        )


def sample(
    logits: Tensor,  # [num_rows, num_tokens]
    batch: SamplingBatch,
    group: TensorParallelGroup,
    first_token: int,
    vocab_size: int,
) -> Tensor:
    """The token id of each row, [num_rows] int64, the same on every rank.

    This rank holds the logits of the tokens from first_token on, in any float type; columns beyond
    vocab_size are padding. Every rank has the same batch, and a higher rank has higher tokens. NaN
    counts as -inf, and a row that has nothing else gives some token id below vocab_size.
    """
    logits = logits[:, : vocab_size - first_token]
    assert len(logits) == batch.num_rows, (len(logits), batch.num_rows)
    assert logits.shape[1] > 0, (first_token, vocab_size)
    best = torch.empty(batch.num_rows, 2, dtype=torch.float64, device=logits.device)
    if len(batch.greedy_rows):
        chunks = ScoreChunks.of_logits(_take(logits, batch.greedy_rows), first_token)
        best[batch.greedy_rows] = _pairs(chunks.winners())
    if len(batch.sampled_rows):
        chunks = ScoreChunks.of_logits(_take(logits, batch.sampled_rows), first_token)
        best[batch.sampled_rows] = _pairs(_sampled_winners(chunks, batch, group, vocab_size))
    return _best_of_ranks(group.all_gather(best))


def draw(
    chunks: ScoreChunks,
    floors: Tensor,  # [num_rows] float32
    keys: NoiseKeys,
    group: TensorParallelGroup,
    vocab_size: int,
) -> Tensor:
    """Samples the softmax of each row's scores from its floor up, [num_rows] int64.

    The best score of a row over all ranks is 0. A row that has none gives the last token id.
    """
    pairs = _pairs(_perturbed_winners(chunks, floors, keys, vocab_size))
    return _best_of_ranks(group.all_gather(pairs))


def _sampled_winners(
    chunks: ScoreChunks, batch: SamplingBatch, group: TensorParallelGroup, vocab_size: int
) -> Winners:
    chunks.scale(batch.temperatures, group)
    floors = support_floors(chunks, batch.truncation, group)
    return _perturbed_winners(chunks, floors, batch.noise_keys, vocab_size)


def _perturbed_winners(
    chunks: ScoreChunks, floors: Tensor, keys: NoiseKeys, vocab_size: int
) -> Winners:
    candidates = _Candidates.within_noise(chunks, floors)
    if len(candidates.rows) > _MANY_CHUNKS:
        candidates = candidates.that_can_win(chunks, floors, keys)
    return candidates.winners(chunks, floors, keys, vocab_size)


@dataclass(frozen=True)
class _Candidates:
    """Chunks, by row and column, that may hold the winners of their rows."""

    rows: Tensor  # [num_chunks] int64
    columns: Tensor  # [num_chunks] int64

    @classmethod
    def within_noise(cls, chunks: ScoreChunks, floors: Tensor) -> _Candidates:
        """Leaves out what the largest noise could not lift to the best token with the smallest.

        floors: [num_rows] float32, here and below.
        """
        floors = floors.clamp(min=MIN_NOISE - MAX_NOISE - _ROUNDING)
        return cls(*(chunks.maxima >= floors.unsqueeze(1)).nonzero().unbind(1))

    def that_can_win(self, chunks: ScoreChunks, floors: Tensor, keys: NoiseKeys) -> _Candidates:
        """Leaves out the chunks that fall short even with their largest noise on their best token.

        Each row has a score that is surely reached: the best token's with the smallest noise, or a
        token's that has the largest noise of its chunk.
        """
        largest = largest_noise(keys[self.rows], chunks.first_chunk + self.columns)
        scores = chunks.scores[self.rows, self.columns, largest.offsets]
        reached = (scores + largest.noise).masked_fill_(scores < floors[self.rows], -torch.inf)
        best = torch.full_like(floors, MIN_NOISE).scatter_reduce_(0, self.rows, reached, "amax")
        limits = chunks.maxima[self.rows, self.columns] + largest.noise
        chosen = (limits >= best[self.rows] - _ROUNDING).nonzero().squeeze(1)
        return _Candidates(self.rows[chosen], self.columns[chosen])

    def winners(
        self, chunks: ScoreChunks, floors: Tensor, keys: NoiseKeys, vocab_size: int
    ) -> Winners:
        """The best token of each row with its noise; a row without candidates gets the last id."""
        chunk_ids = chunks.first_chunk + self.columns
        scores = chunks.scores[self.rows, self.columns]  # [num_chunks, CHUNK_TOKENS]
        perturbed = scores + gumbel_noise(keys[self.rows], chunk_ids)
        perturbed.masked_fill_(scores < floors[self.rows].unsqueeze(1), -torch.inf)
        best, offsets = perturbed.max(1)
        token_ids = chunk_ids * CHUNK_TOKENS + offsets
        row_best = torch.full_like(floors, -torch.inf).scatter_reduce_(0, self.rows, best, "amax")
        wins = (best == row_best[self.rows]).nonzero().squeeze(1)
        row_ids = torch.full_like(floors, vocab_size - 1, dtype=torch.int64)
        row_ids.scatter_reduce_(0, self.rows[wins], token_ids[wins], "amin")
        return Winners(row_best, row_ids)


def _best_of_ranks(best: Tensor) -> Tensor:
    """best: [size, num_rows, 2] float64, the score and the token id that each rank offers."""
    # The first of equal ranks holds the lowest token ids.
    ranks = best[:, :, 0].argmax(0, keepdim=True)
    return best[:, :, 1].gather(0, ranks).squeeze(0).long()


def _pairs(winners: Winners) -> Tensor:
    """[num_rows, 2] float64, which holds scores and token ids exactly."""
    return torch.stack([winners.scores.double(), winners.token_ids.double()], dim=1)


def _take(logits: Tensor, rows: Tensor) -> Tensor:
    return logits if len(rows) == len(logits) else logits[rows]


def _values_at(
    rows: Sequence[int],
    device: torch.device | str,
    values: Sequence[float],
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    return torch.tensor([values[row] for row in rows], dtype=dtype, device=device)
