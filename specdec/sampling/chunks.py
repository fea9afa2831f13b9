"""Scores of one rank's tokens, in chunks whose maxima let most of the vocabulary be passed over."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.distributed.group import TensorParallelGroup
from specdec.sampling.gumbel import CHUNK_TOKENS

_LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class Winners:
    """The best token of each row; -inf marks a row that has none here."""

    scores: Tensor  # [num_rows] float32
    token_ids: Tensor  # [num_rows] int64


@dataclass(frozen=True)
class ScoreChunks:
    """Scores of the tokens from CHUNK_TOKENS * first_chunk on, as many rows as are sampled.

    They are never NaN, and -inf wherever this rank holds no token. Chunks are the same for every
    division of the vocabulary, so that noise can be computed by chunk.
    """

    scores: Tensor  # [num_rows, num_columns, CHUNK_TOKENS] float32
    maxima: Tensor  # [num_rows, num_columns] float32
    first_chunk: int

    @classmethod
    def of_logits(cls, logits: Tensor, first_token: int) -> ScoreChunks:
        """Copies logits ([num_rows, num_tokens], any float type); NaN counts as -inf."""
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
        """Turns logits into log(probability / probability of the row's best token), in place.

        temperatures: [num_rows] float32, above 0. Taking off the best first keeps a temperature
        near 0 from overflowing, and keeps the best scores where float32 is dense.
        """
        peaks = group.all_gather(self.maxima.amax(1)).amax(0).clamp(min=_LOWEST)
        for scores in (self.scores.flatten(1), self.maxima):
            scores.sub_(peaks.unsqueeze(1)).div_(temperatures.unsqueeze(1))

    def cut(self, floors: Tensor) -> None:
        """Sets what is below its row's floor ([num_rows] float32) to -inf, in place."""
        self.scores.masked_fill_(self.scores < floors.view(-1, 1, 1), -torch.inf)
        self.maxima.masked_fill_(self.maxima < floors.unsqueeze(1), -torch.inf)

    def take(self, rows: Tensor) -> ScoreChunks:
        """A copy of some rows; rows: int64."""
        return ScoreChunks(self.scores[rows], self.maxima[rows], self.first_chunk)

    def winners(self) -> Winners:
        """The best token of each row, the lowest id where scores are equal."""
        best, columns = self.maxima.max(1)
        rows = torch.arange(len(best), device=best.device)
        offsets = self.scores[rows, columns].argmax(1)
        return Winners(best, (self.first_chunk + columns) * CHUNK_TOKENS + offsets)
