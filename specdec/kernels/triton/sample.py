"""Argmax and sampling of rows of logits on a GPU, in fixed shapes.

`specdec.sampling.device` is the definition. The random words are its own; logarithms and sums may
differ from torch's in the last place, so a token may differ where the two best scores with noise
are closer than 2e-5, or where the probability above a token equals top_p to within 1e-5.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from specdec.config.gpu.truncation_search import TILE_TOKENS
from specdec.kernels.reference.sample_rows import RowArgmax, RowSampling
from specdec.kernels.triton.device import sample as kernels
from specdec.kernels.triton.truncation import truncation_floors


class TileArgmax:
    """The best logit of each tile of R rows."""

    def __init__(self, logits: Tensor) -> None:
        """Find them; logits: [R, vocab_size] of any floating-point type."""
        assert logits.stride(1) == 1
        self.logits = logits
        num_rows, vocab_size = logits.shape
        self.num_tiles = triton.cdiv(vocab_size, TILE_TOKENS)
        shape, device = (num_rows, self.num_tiles), logits.device
        self.best = torch.empty(shape, dtype=torch.float32, device=device)
        self.best_ids = torch.empty(shape, dtype=torch.int32, device=device)
        self._is_invalid = torch.empty(shape, dtype=torch.int32, device=device)
        kernels.tile_argmax[shape](
            logits,
            self.best,
            self.best_ids,
            self._is_invalid,
            logits.stride(0),
            vocab_size,
            self.num_tiles,
            BLOCK=TILE_TOKENS,
            num_warps=4,
        )

    def reduce(self) -> RowArgmax:
        """Return the best token of each row, the first one of equals."""
        num_rows, vocab_size = self.logits.shape
        device = self.logits.device
        values = torch.empty(num_rows, dtype=torch.float32, device=device)
        token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
        has_nan = torch.empty(num_rows, dtype=torch.int32, device=device)
        kernels.row_argmax[(num_rows,)](
            self.best,
            self.best_ids,
            self._is_invalid,
            values,
            token_ids,
            has_nan,
            vocab_size,
            self.num_tiles,
            BLOCK_TILES=triton.next_power_of_2(self.num_tiles),
            num_warps=1,
        )
        return RowArgmax(values, token_ids, has_nan.bool())


def sample_rows(
    logits: Tensor, sampling: RowSampling, least_floor: float, *, truncates: bool = True
) -> tuple[Tensor, RowArgmax]:
    """Sample a token for each row, [R] int64; return the argmax of the rows, too.

    logits: [R, vocab_size], the whole vocabulary. least_floor: score below which no noise lets a
    token win. truncates: whether a row may have min_p, top_k or top_p.
    """
    tiles = TileArgmax(logits)
    best = tiles.reduce()
    num_rows, vocab_size = logits.shape
    floors = sampling.min_scores
    if truncates:
        floors = truncation_floors(logits, tiles.best, best.values, sampling.limits)
    kernels.perturbed_argmax[(num_rows, tiles.num_tiles)](
        logits,
        tiles.best,
        tiles.best_ids,
        best.values,
        sampling.temperatures,
        floors,
        sampling.seeds,
        sampling.choices,
        sampling.positions,
        logits.stride(0),
        vocab_size,
        tiles.num_tiles,
        least_floor,
        BLOCK=TILE_TOKENS,
        num_warps=8,
        enable_fp_fusion=False,
    )
    return tiles.reduce().token_ids, best
