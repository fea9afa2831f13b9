"""Argmax and sampling of rows of logits on a GPU, in fixed shapes.

`specdec.sampling.sampler` is the definition. The random words are its own; logarithms and sums may
differ from torch's in the last place, so a token may differ where the two best scores with noise
are closer than 2e-5, or where the probability above a token equals top_p to within 1e-5.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from specdec.kernels.sample import RowArgmax, SampleParams
from specdec.kernels.triton.device import sample as kernels

_BLOCK = 2048


@dataclass(frozen=True)
class DeviceSampling:
    """Sampling parameters of R rows of logits, on the device."""

    temperatures: Tensor  # [R] float32; 0 for the argmax
    top_k: Tensor  # [R] int32; 0 for no limit
    top_p: Tensor  # [R] float64; 1 for no limit
    min_scores: Tensor  # [R] float32, log(min_p); -inf for no limit
    keys: Tensor  # [R, 5] int32: bits of the seed (low, high), choice, position and stream

    @classmethod
    def of(cls, params: SampleParams, device: torch.device) -> DeviceSampling:
        """Copy sampling parameters to a device."""
        keys = np.zeros((len(params), 5), np.uint32)
        seeds = params["seed"].astype(np.uint64)  # wraps, so the bits stay
        keys[:, 0], keys[:, 1] = seeds & 0xFFFFFFFF, seeds >> 32
        keys[:, 2], keys[:, 3] = params["choice"], params["position"]
        columns = (
            params["temperature"].astype(np.float32),
            params["top_k"].astype(np.int32),
            params["top_p"].astype(np.float64),
            params["min_score"].astype(np.float32),
            keys.view(np.int32),
        )
        return cls(*(torch.from_numpy(column.copy()).to(device) for column in columns))


class TileArgmax:
    """The best logit of each tile of R rows."""

    def __init__(self, logits: Tensor) -> None:
        """Find them; logits: [R, vocab_size] of any floating-point type."""
        assert logits.stride(1) == 1
        self.logits = logits
        num_rows, vocab_size = logits.shape
        self.num_tiles = triton.cdiv(vocab_size, _BLOCK)
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
            BLOCK=_BLOCK,
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


def truncation_floors(tiles: TileArgmax, best: Tensor, sampling: DeviceSampling) -> Tensor:
    """Return the lowest score that passes min_p, top_k and then top_p, [R] float32.

    Scores are log(probability / probability of the best token). best: [R], the best logits. Rows
    that are not sampled, and rows without limits, have -inf.
    """
    num_rows, vocab_size = tiles.logits.shape
    floors = torch.full((num_rows,), -torch.inf, dtype=torch.float32, device=tiles.logits.device)
    kernels.truncation_floors[(num_rows,)](
        tiles.logits,
        tiles.best,
        best,
        sampling.temperatures,
        sampling.top_k,
        sampling.top_p,
        sampling.min_scores,
        floors,
        tiles.logits.stride(0),
        vocab_size,
        tiles.num_tiles,
        BLOCK=_BLOCK,
        BLOCK_TILES=triton.next_power_of_2(tiles.num_tiles),
        num_warps=8,
        enable_fp_fusion=False,
    )
    return floors


def sample_rows(logits: Tensor, sampling: DeviceSampling, least_floor: float) -> RowArgmax:
    """Sample a token for each row; the values of sampled rows are scores with noise.

    logits: [R, vocab_size], the whole vocabulary. least_floor: score below which no noise lets a
    token win.
    """
    tiles = TileArgmax(logits)
    best = tiles.reduce()
    floors = truncation_floors(tiles, best.values, sampling)
    num_rows, vocab_size = logits.shape
    kernels.perturbed_argmax[(num_rows, tiles.num_tiles)](
        logits,
        tiles.best,
        tiles.best_ids,
        best.values,
        sampling.temperatures,
        floors,
        sampling.keys,
        logits.stride(0),
        vocab_size,
        tiles.num_tiles,
        least_floor,
        BLOCK=_BLOCK,
        num_warps=8,
        enable_fp_fusion=False,
    )
    sampled = tiles.reduce()
    return RowArgmax(sampled.values, sampled.token_ids, best.has_nan)
