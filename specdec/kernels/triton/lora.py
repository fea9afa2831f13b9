"""Grouped low-rank updates on a GPU; see `specdec.kernels.reference.lora` for their definition.

Two launches for a linear layer, whatever adapters its rows have. Tiles, and parts of the inner
dimension, follow from the layer alone, so that a row has the same bits in any batch.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from specdec.config.engine import LEAST_UPDATE_PART, MOST_UPDATE_PARTS
from specdec.kernels.reference.lora import LoraStack
from specdec.kernels.triton.device import lora as kernels

BLOCK_M, BLOCK_N, BLOCK_K = 16, 128, 64
"""Tiles of rows, which a step of decodes fills least, of outputs, and of the inner dimension."""

_MAX_BLOCK_R = 64


class TritonLora:
    """Adds updates on a device, on which it holds the tiles of the layers' columns."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tiles: dict[tuple[range, ...], Tensor] = {}  # by columns

    def prepare(self, stack: LoraStack) -> None:
        """Copy the tiles of a layer to the device, which no graph may do."""
        if stack.columns not in self._tiles:
            tiles = [
                (index, first, each.stop)
                for index, each in enumerate(stack.columns)
                for first in range(each.start, each.stop, BLOCK_N)
            ]
            values = torch.tensor(tiles, dtype=torch.int32).view(-1, 3)
            self._tiles[stack.columns] = values.to(self._device)

    def __call__(self, y: Tensor, x: Tensor, places: Tensor, stack: LoraStack) -> None:
        """See AddUpdates; `prepare` must have been called for the layer."""
        assert x.stride(1) == 1
        assert y.stride(1) == 1
        tiles = self._tiles[stack.columns]
        if not len(x) or not len(tiles):
            return
        hidden = _shrunk(x, places, stack)
        num_parts, num_rows, num_ranks = hidden.shape
        kernels.expand[(triton.cdiv(num_rows, BLOCK_M), len(tiles))](
            hidden,
            places,
            stack.ups,
            tiles,
            y,
            num_rows,
            stack.ups.shape[2],
            num_ranks,
            y.stride(0),
            NUM_PARTS=num_parts,
            RANK=stack.rank,
            BLOCK_M=BLOCK_M,
            BLOCK_R=block_of_ranks(stack.rank),
            BLOCK_N=BLOCK_N,
            num_warps=4,
            num_stages=2,
        )


def _shrunk(x: Tensor, places: Tensor, stack: LoraStack) -> Tensor:
    """Return the products of rows by the first matrices, [parts of their sums, T, ranks]."""
    (num_rows, inner), num_ranks = x.shape, stack.downs.shape[1]
    block_r, num_parts = block_of_ranks(stack.rank), num_parts_of(inner)
    hidden = x.new_empty(num_parts, num_rows, num_ranks, dtype=torch.float32)
    kernels.shrink[(triton.cdiv(num_rows, BLOCK_M), num_ranks // block_r, num_parts)](
        x,
        places,
        stack.downs,
        hidden,
        num_rows,
        inner,
        num_ranks,
        triton.cdiv(triton.cdiv(inner, num_parts), BLOCK_K) * BLOCK_K,
        x.stride(0),
        BLOCK_M=BLOCK_M,
        BLOCK_R=block_r,
        BLOCK_K=block_of_inner(x.element_size()),
        num_warps=4,
        num_stages=3,
    )
    return hidden


def block_of_ranks(rank: int) -> int:
    """Return the ranks of a tile."""
    return min(rank, _MAX_BLOCK_R)


def block_of_inner(element_size: int) -> int:
    """Return the inner size of a tile, so that its stages fit into shared memory."""
    return BLOCK_K if element_size == 2 else BLOCK_K // 2


def num_parts_of(inner: int) -> int:
    """Return the parts of the inner dimension, so that a few rows take many programs."""
    return max(1, min(MOST_UPDATE_PARTS, inner // LEAST_UPDATE_PART))
