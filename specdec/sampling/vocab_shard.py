"""One rank's shard of the vocabulary: its scores in chunks, and the argmax over all shards."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.kernels.cpu import SharedMemory
from specdec.kernels.reference.sample_rows import RowArgmax, SampleParams
from specdec.kernels.sample import shared_memory_argmax
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.sampling.gumbel import CHUNK_TOKENS

_LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class VocabShard:
    """The vocabulary shard of one rank: it holds the logits of the tokens from `first_token` on.

    Columns of logits beyond vocab_size are padding. A higher rank has higher token ids.
    """

    group: TensorParallelGroup
    first_token: int
    vocab_size: int

    def can_sample(self, params: SampleParams) -> NDArray[np.bool_]:
        """Return the rows that each rank can sample by itself: no cut over several ranks.

        params: [num_rows].
        """
        if self.group.size == 1:
            return np.ones(len(params), np.bool_)
        is_cut = (params["top_k"] > 0) | (params["top_p"] < 1) | (params["min_score"] > -np.inf)
        return np.asarray(~is_cut | (params["temperature"] == 0))


@dataclass(frozen=True)
class ScoreChunks:
    """Scores of the tokens from CHUNK_TOKENS * first_chunk on, one row for each sampled row.

    Most chunks are skipped because of their maximum.
    Scores are never NaN, and -inf for tokens that this rank does not hold. Chunk boundaries do not
    depend on how the vocabulary is split, because noise is computed by chunk.
    """

    scores: Tensor  # [num_rows, num_columns, CHUNK_TOKENS] float32
    maxima: Tensor  # [num_rows, num_columns] float32
    first_chunk: int

    @classmethod
    def of_logits(cls, logits: Tensor, first_token: int) -> ScoreChunks:
        """Copy logits ([num_rows, num_tokens], any float type); NaN counts as -inf."""
        num_rows, num_tokens = logits.shape
        first_chunk, start = divmod(first_token, CHUNK_TOKENS)
        num_columns = -(-(start + num_tokens) // CHUNK_TOKENS)
        shape = (num_rows, num_columns * CHUNK_TOKENS)
        flat = torch.empty(shape, dtype=torch.float32, device=logits.device)
        flat[:, :start] = -torch.inf
        flat[:, start + num_tokens :] = -torch.inf
        held = flat[:, start : start + num_tokens]
        held.copy_(logits).nan_to_num_(nan=-torch.inf, neginf=-torch.inf)
        scores = flat.view(num_rows, num_columns, CHUNK_TOKENS)
        return cls(scores, scores.amax(2), first_chunk)

    def scale(self, temperatures: Tensor, group: TensorParallelGroup) -> None:
        """Turn logits into log(probability / probability of the row's best token), in place.

        temperatures: [num_rows] float32, above 0. A collective call. The row maximum is subtracted
        before the division, so that a temperature near 0 does not overflow and the best scores are
        near 0, where float32 is dense.
        """
        row_maxima = group.all_gather(self.maxima.amax(1)).amax(0).clamp(min=_LOWEST)
        for scores in (self.scores.flatten(1), self.maxima):
            scores.sub_(row_maxima.unsqueeze(1)).div_(temperatures.unsqueeze(1))

    def mask_below(self, floors: Tensor) -> None:
        """Set scores below the floor of their row ([num_rows] float32) to -inf, in place."""
        self.scores.masked_fill_(self.scores < floors.view(-1, 1, 1), -torch.inf)
        self.maxima.masked_fill_(self.maxima < floors.unsqueeze(1), -torch.inf)

    def take(self, rows: Tensor) -> ScoreChunks:
        """Copy some rows; rows: int64."""
        return ScoreChunks(self.scores[rows], self.maxima[rows], self.first_chunk)


def all_ranks_argmax(argmax: RowArgmax, shard: VocabShard) -> RowArgmax:
    """Return the argmax over the whole vocabulary, equal on every rank; a collective call.

    argmax: of this rank's logits. A row has NaN if it has NaN on any rank.
    """
    group = shard.group
    if group.size == 1:
        return argmax
    if isinstance(group.collectives, SharedMemory):
        return shared_memory_argmax(argmax, group.collectives, shard.first_token)
    columns = (argmax.values, shard.first_token + argmax.token_ids, argmax.has_nan)
    own = torch.stack([column.double() for column in columns], dim=1)  # float64 holds each exactly
    values, token_ids, has_nan = group.all_gather(own).unbind(2)  # [size, num_rows] each
    # Of ranks with equal values, argmax takes the first, which has the lowest token ids.
    best = values.argmax(0, keepdim=True)
    return RowArgmax(
        values.gather(0, best).squeeze(0).float(),
        token_ids.gather(0, best).squeeze(0).long(),
        has_nan.any(0),
    )
