"""The token that each row of logits is defined to be.

That is the argmax of (logits / temperature, cut by min_p, top_k and top_p) + Gumbel noise, which is
a sample of the softmax of what the cut left (the Gumbel-max trick: Gumbel 1954; see Maddison,
Tarlow and Minka 2014, arXiv 1411.0030). At temperature 0 it is the argmax of the logits. Equal
scores go to the lowest token id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.distributed.group import TensorParallelGroup
from specdec.kernels.sample import SAMPLE_PARAMS, RowArgmax, SampleParams, row_argmax, sample_tokens
from specdec.sampling.chunks import ScoreChunks, Winners
from specdec.sampling.gumbel import (
    CHUNK_TOKENS,
    MAX_NOISE,
    MIN_NOISE,
    NoiseKeys,
    gumbel_noise,
    largest_noise,
)
from specdec.sampling.truncation import Truncation, min_score, support_floors

# From so many chunks on it pays to compute first which of them can win.
_MANY_CHUNKS = 256
# More than float32 rounds off scores and noise, which are below 100 wherever it matters.
_ROUNDING = 1e-3
_LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, eq=False)
class SamplingBatch:
    """How the rows of a batch are sampled. It is on the host, which decides what work is left out.

    What is made of it for torch is of the sampled rows only, in their order.
    """

    params: SampleParams  # [num_rows], the rows in order
    device: torch.device
    argmax: RowArgmax | None = (
        None  # of the logits to be sampled, where somebody has read them already
    )

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
        params = np.empty(len(temperatures), dtype=SAMPLE_PARAMS)
        params["temperature"] = [_in_float32(temperature) for temperature in temperatures]
        params["top_k"], params["top_p"] = top_k, top_p
        params["min_score"] = [min_score(each) for each in min_p]
        params["seed"], params["choice"], params["position"] = seeds, choices, positions
        return cls.from_params(params, device)

    @classmethod
    def from_params(
        cls, params: SampleParams, device: torch.device | str, argmax: RowArgmax | None = None
    ) -> SamplingBatch:
        """One for each row of logits, in order; takes them over, and numbers them."""
        params["row"] = np.arange(len(params))
        return cls(params, torch.device(device), argmax)

    @classmethod
    def greedy(cls, num_rows: int, device: torch.device) -> SamplingBatch:
        """Rows that are not sampled: the likeliest token of each."""
        return cls.from_params(np.zeros(num_rows, dtype=SAMPLE_PARAMS), device)

    def take(self, rows: NDArray[np.int64]) -> SamplingBatch:
        """Of some of the rows alone."""
        return self.from_params(self.params[rows], self.device)

    def with_temperatures(self, temperatures: Tensor) -> SamplingBatch:
        """The same with other temperatures of the sampled rows, [num_sampled] float32, above 0."""
        params = self.params.copy()
        params["temperature"][self._is_sampled] = temperatures.cpu().numpy()
        return replace(self, params=params)

    @property
    def num_rows(self) -> int:
        return len(self.params)

    @cached_property
    def greedy_rows(self) -> Tensor:
        """[num_greedy] int64."""
        return self._tensor(np.flatnonzero(~self._is_sampled))

    @cached_property
    def sampled_rows(self) -> Tensor:
        """[num_sampled] int64."""
        return self._tensor(np.flatnonzero(self._is_sampled))

    @cached_property
    def temperatures(self) -> Tensor:
        """[num_sampled] float32, above 0."""
        return self._tensor(self._sampled["temperature"])

    @cached_property
    def truncation(self) -> Truncation:
        """What cuts the sampled rows."""
        sampled = self._sampled
        top_k, top_p, min_scores = (
            sampled[name].tolist() for name in ("top_k", "top_p", "min_score")
        )
        return Truncation.from_lists(top_k, top_p, min_scores, self.device)

    @cached_property
    def noise_keys(self) -> NoiseKeys:
        """What fixes the noise of the sampled rows."""
        sampled = self._sampled
        choices, positions = (sampled[name].astype(np.int64) for name in ("choice", "position"))
        return NoiseKeys(*map(self._tensor, (sampled["seed"], choices, positions)))

    @property
    def is_any_sampled(self) -> bool:
        """Whether any row is not greedy."""
        return bool(self._is_sampled.any())

    @cached_property
    def _is_sampled(self) -> NDArray[np.bool_]:
        return np.asarray(self.params["temperature"] > 0)

    @cached_property
    def _sampled(self) -> SampleParams:
        return self.params[self._is_sampled]

    def _tensor(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)


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
    if group.size == 1 and not batch.is_any_sampled:
        return _row_argmax(logits, batch).token_ids
    drawn = sample_tokens(logits, batch.params) if group.size == 1 else None
    if drawn is None:
        return torch_sample(logits, batch, group, first_token, vocab_size)
    open_rows = np.flatnonzero(drawn < 0)
    if len(open_rows):
        left = logits[torch.from_numpy(open_rows)], batch.take(open_rows)
        drawn[open_rows] = torch_sample(*left, group, first_token, vocab_size).numpy()
    return torch.from_numpy(drawn)


def torch_sample(
    logits: Tensor,  # [num_rows, num_tokens], of this rank, without padding
    batch: SamplingBatch,
    group: TensorParallelGroup,
    first_token: int,
    vocab_size: int,
) -> Tensor:
    """The reference of `sample`, and what runs over several ranks, and on other devices than a CPU.

    Returns [num_rows] int64.
    """
    best = torch.empty(batch.num_rows, 2, dtype=torch.float64, device=logits.device)
    if len(batch.greedy_rows):
        argmax = _row_argmax(logits, batch).take(batch.greedy_rows)
        best[batch.greedy_rows] = _pairs(Winners(argmax.values, first_token + argmax.token_ids))
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


def _row_argmax(logits: Tensor, batch: SamplingBatch) -> RowArgmax:
    return row_argmax(logits) if batch.argmax is None else batch.argmax


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


def _in_float32(temperature: float) -> float:
    """One that float32 would round to 0 must not become a division by 0."""
    return max(temperature, _LEAST_TEMPERATURE) if temperature > 0 else 0.0
