"""Sampling of one token for each row of logits, with the Gumbel-max trick.

The token is the argmax of (logits / temperature, truncated by min_p, top_k and top_p) + Gumbel
noise, which is a sample of the softmax of the truncated logits (Gumbel 1954; see Maddison, Tarlow
and Minka 2014, arXiv 1411.0030). At temperature 0 it is the argmax of the logits. Of equal scores
the lowest token id wins.
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

from specdec.kernels.reference.sample_rows import SAMPLE_PARAMS, RowArgmax, SampleParams
from specdec.kernels.reference.triton_availability import has_triton
from specdec.kernels.sample import row_argmax, sample_tokens
from specdec.sampling.gumbel import (
    CHUNK_TOKENS,
    MAX_NOISE,
    MIN_NOISE,
    NoiseKeys,
    gumbel_noise,
    largest_noise,
)
from specdec.sampling.row_exchange import exchanged_slabs, gather_rows, own_rows, whole_rows
from specdec.sampling.truncation import Truncation, min_score, truncation_floors
from specdec.sampling.vocab_shard import ScoreChunks, VocabShard

# With more chunks than this it is faster to select first those that can win.
_MANY_CHUNKS = 256
# Above the float32 rounding error of scores and noise, which are below 100 wherever it matters.
_ROUNDING = 1e-3
LEAST_SCORE = MIN_NOISE - MAX_NOISE - _ROUNDING
"""No noise lets a token win whose score is below this; the best score of a row is 0."""
_LEAST_TEMPERATURE = 1e-30
"""Sampling is an argmax at this temperature and below, and logits divided by it are finite in
float32, also by a part of it (`draft_temperature`)."""


@dataclass(frozen=True, eq=False)
class SamplingBatch:
    """Sampling parameters of the rows of a batch, on the host, which selects the work to run.

    The tensors made from it cover the sampled rows only (temperature above 0), in their order.
    """

    params: SampleParams  # [num_rows], the rows in order
    device: torch.device
    argmax: RowArgmax | None = None  # of the logits to sample, if it is known already

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
        """Make a batch from one entry for each row of logits; fields as in SamplingParams.

        positions: index of the sampled token among the output tokens of its choice.
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
        """Make a batch from one record for each row of logits; sets the row numbers in place."""
        params["row"] = np.arange(len(params))
        return cls(params, torch.device(device), argmax)

    def take(self, rows: NDArray[np.int64]) -> SamplingBatch:
        """Return the batch of the given rows."""
        return self.from_params(self.params[rows], self.device)

    def with_temperatures(self, temperatures: Tensor) -> SamplingBatch:
        """Replace the temperatures of the sampled rows, [num_sampled] float32, above 0."""
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
        """Truncation of the sampled rows."""
        return Truncation.of(self._sampled, self.device)

    @cached_property
    def noise_keys(self) -> NoiseKeys:
        """Noise keys of the sampled rows."""
        return self._keys_of(self._sampled)

    @property
    def noise_keys_of_all(self) -> NoiseKeys:
        """Noise keys of all rows, the greedy ones included."""
        return self._keys_of(self.params)

    @property
    def is_any_sampled(self) -> bool:
        """Return whether any row is not greedy."""
        return bool(self._is_sampled.any())

    @cached_property
    def _is_sampled(self) -> NDArray[np.bool_]:
        return np.asarray(self.params["temperature"] > 0)

    @cached_property
    def _sampled(self) -> SampleParams:
        return self.params[self._is_sampled]

    def _keys_of(self, params: SampleParams) -> NoiseKeys:
        choices, positions = (params[name].astype(np.int64) for name in ("choice", "position"))
        return NoiseKeys(*map(self._tensor, (params["seed"], choices, positions)))

    def _tensor(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)


def sample(
    logits: Tensor,  # [num_rows, num_tokens]
    batch: SamplingBatch,
    shard: VocabShard,
) -> Tensor:
    """Sample each row; return token ids [num_rows] int64, the same on every rank.

    A collective call; every rank passes the same batch. logits: of this rank, of any float type.
    NaN counts as -inf; a row of -inf returns some token id below vocab_size.
    """
    logits = logits[:, : shard.vocab_size - shard.first_token]
    assert len(logits) == batch.num_rows, (len(logits), batch.num_rows)
    assert logits.shape[1] > 0, shard
    is_alone = shard.group.size == 1
    if is_alone and not batch.is_any_sampled:
        return _row_argmax(logits, batch).token_ids
    if batch.is_any_sampled and has_triton(logits.device):
        return _triton_sample(logits, batch) if is_alone else _by_rows(logits, batch, shard)
    sampled = sample_tokens(logits, batch.params) if is_alone else None
    if sampled is None:
        return torch_sample(logits, batch, shard)
    open_rows = np.flatnonzero(sampled < 0)  # rows that the kernel left to torch
    if len(open_rows):
        rest = logits[torch.from_numpy(open_rows)], batch.take(open_rows)
        sampled[open_rows] = torch_sample(*rest, shard).numpy()
    return torch.from_numpy(sampled)


def _by_rows(logits: Tensor, batch: SamplingBatch, shard: VocabShard) -> Tensor:
    """Sample a share of the rows on each rank, with the bits of a single rank; [num_rows] int64."""
    index = np.arange(len(logits))
    slabs = exchanged_slabs(len(logits), shard)
    return torch.cat([_exchange(logits[slab], batch, index[slab], shard) for slab in slabs])


def _exchange(
    logits: Tensor, batch: SamplingBatch, rows: NDArray[np.int64], shard: VocabShard
) -> Tensor:
    """Sample rows of a batch, whose logits are exchanged at once; as `_by_rows`."""
    own, whole = own_rows(len(rows), shard), whole_rows(logits, shard)
    tokens = torch.zeros(len(whole), dtype=torch.int64, device=logits.device)
    if len(whole) > 0:
        tokens = _triton_sample(whole, batch.take(rows[own]))
    return gather_rows(tokens, len(rows), shard)


def _triton_sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Sample the whole vocabulary on the device, without waiting for it; [num_rows] int64."""
    from specdec.kernels.triton.sample import RowSampling, sample_rows  # imports Triton

    sampling = RowSampling.of(batch.params, logits.device)
    return sample_rows(logits, sampling, LEAST_SCORE).token_ids


def torch_sample(
    logits: Tensor,  # [num_rows, num_tokens], of this rank, without padding
    batch: SamplingBatch,
    shard: VocabShard,
) -> Tensor:
    """Sample in torch: the reference, used with several ranks where there is no Triton.

    Returns [num_rows] int64.
    """
    best = torch.empty(batch.num_rows, 2, dtype=torch.float64, device=logits.device)
    if len(batch.greedy_rows):
        argmax = _row_argmax(logits, batch).take(batch.greedy_rows)
        best[batch.greedy_rows] = _pairs(argmax.values, shard.first_token + argmax.token_ids)
    if len(batch.sampled_rows):
        chunks = ScoreChunks.of_logits(_take(logits, batch.sampled_rows), shard.first_token)
        chunks.scale(batch.temperatures, shard.group)
        floors = truncation_floors(chunks, batch.truncation, shard.group)
        noise_keys = batch.noise_keys
        best[batch.sampled_rows] = _perturbed_best(chunks, floors, noise_keys, shard.vocab_size)
    return _best_of_ranks(shard.group.all_gather(best))


def sample_scores(
    chunks: ScoreChunks,
    floors: Tensor,  # [num_rows] float32
    keys: NoiseKeys,
    shard: VocabShard,
) -> Tensor:
    """Sample the softmax of each row's scores at or above its floor; return [num_rows] int64.

    The best score of a row over all ranks must be 0; an empty row returns the last token id. A
    collective call.
    """
    best = _perturbed_best(chunks, floors, keys, shard.vocab_size)
    return _best_of_ranks(shard.group.all_gather(best))


def _row_argmax(logits: Tensor, batch: SamplingBatch) -> RowArgmax:
    return row_argmax(logits) if batch.argmax is None else batch.argmax


def _perturbed_best(
    chunks: ScoreChunks, floors: Tensor, keys: NoiseKeys, vocab_size: int
) -> Tensor:
    """Return score with noise and id of each row's best token on this rank, [num_rows, 2]."""
    candidates = _Candidates.within_noise(chunks, floors)
    if len(candidates.rows) > _MANY_CHUNKS:
        candidates = candidates.that_can_win(chunks, floors, keys)
    return candidates.best_tokens(chunks, floors, keys, vocab_size)


@dataclass(frozen=True)
class _Candidates:
    """Chunks, by row and column, that may hold the best token of their row."""

    rows: Tensor  # [num_chunks] int64
    columns: Tensor  # [num_chunks] int64

    @classmethod
    def within_noise(cls, chunks: ScoreChunks, floors: Tensor) -> _Candidates:
        """Select the chunks whose maximum with MAX_NOISE reaches the best score with MIN_NOISE.

        floors: [num_rows] float32, here and below.
        """
        floors = floors.clamp(min=LEAST_SCORE)
        return cls(*(chunks.maxima >= floors.unsqueeze(1)).nonzero().unbind(1))

    def that_can_win(self, chunks: ScoreChunks, floors: Tensor, keys: NoiseKeys) -> _Candidates:
        """Drop the chunks that cannot win even with their largest noise on their best token.

        The lower bound of a row's best perturbed score is the larger of MIN_NOISE (the best score
        is 0) and the score of any token that has the largest noise of its chunk.
        """
        largest = largest_noise(keys[self.rows], chunks.first_chunk + self.columns)
        scores = chunks.scores[self.rows, self.columns, largest.offsets]
        reached = (scores + largest.noise).masked_fill_(scores < floors[self.rows], -torch.inf)
        best = torch.full_like(floors, MIN_NOISE).scatter_reduce_(0, self.rows, reached, "amax")
        limits = chunks.maxima[self.rows, self.columns] + largest.noise
        chosen = (limits >= best[self.rows] - _ROUNDING).nonzero().squeeze(1)
        return _Candidates(self.rows[chosen], self.columns[chosen])

    def best_tokens(
        self, chunks: ScoreChunks, floors: Tensor, keys: NoiseKeys, vocab_size: int
    ) -> Tensor:
        """Return `_pairs` of the best tokens with noise; a row without candidates: the last id."""
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
        return _pairs(row_best, row_ids)


def _best_of_ranks(best: Tensor) -> Tensor:
    """Return the best token ids; best: [size, num_rows, 2] float64, score and token id by rank."""
    # Of ranks with equal scores, argmax takes the first, which has the lowest token ids.
    ranks = best[:, :, 0].argmax(0, keepdim=True)
    return best[:, :, 1].gather(0, ranks).squeeze(0).long()


def _pairs(scores: Tensor, token_ids: Tensor) -> Tensor:
    """Return [num_rows, 2] float64, which holds scores and token ids exactly."""
    return torch.stack([scores.double(), token_ids.double()], dim=1)


def _take(logits: Tensor, rows: Tensor) -> Tensor:
    return logits if len(rows) == len(logits) else logits[rows]


def _in_float32(temperature: float) -> float:
    """Return a temperature that logits can be divided by in float32; 0 for an argmax."""
    return max(temperature, _LEAST_TEMPERATURE) if temperature > 0 else 0.0
