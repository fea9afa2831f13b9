"""Matrix products on a GPU whose rows have the same bits in any batch.

Libraries select tiles and splits of the inner dimension by the number of rows, so that a row's
sums are added in another order beside other rows (He et al. 2025, "Defeating nondeterminism in LLM
inference"). Here the places at which the inner dimension is divided follow from the matrix alone,
and within a part its elements are added in ascending order, whatever the tile is: an instruction
adds the same 16 products to a sum at a time. So tiles may follow the number of rows, and few tiles
take a program for each part, many one for all parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from specdec.kernels.reference.triton_availability import has_tensor_maps
from specdec.kernels.triton.device import products as kernels

_ENOUGH_PROGRAMS = 256
_LEAST_PART = 512
_PART_UNIT = 128
_SUM_BLOCK = 1024
_MOST_FEW_ROWS = 64
_MOST_SPLIT_TILES = 64
"""Tiles up to which the parts of a product are programs of their own: so few leave most of an H100
idle, and parts of more rows take longer to write and to add than that."""
_MAP_ALIGNMENT = 16


@dataclass(frozen=True)
class Tile:
    """Rows, outputs and inner elements of a tile; and warps and stages of its program.

    The stages take 96 KiB of shared memory at most, which each GPU since Ampere has, or with
    `is_mapped` 160 KiB. is_mapped: whether tensor maps describe x and the weight.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    is_mapped: bool = False


FLOAT32_TILE = Tile(64, 64, 32, 4, 4)
FEW_ROWS_TILE = Tile(64, 64, 128, 4, 3)
"""64 rows are what a multiprocessor of Hopper multiplies at once."""
MANY_ROWS_TILE = Tile(64, 128, 64, 8, 4)
MAPPED_TILE = Tile(64, 256, 64, 4, 4, is_mapped=True)
MAPPED_PARTS_TILE = Tile(64, 128, 64, 4, 4, is_mapped=True)
"""Narrower, for a matrix with parts: a program has the sums of a part beside those of all."""
HEADS_TILE = Tile(64, 64, 64, 4, 3)
"""The tile of `multiply_heads`, in 16 bits."""


def num_parts_of(size: int, inner: int) -> int:
    """Return the parts of the inner dimension of a matrix: enough that few rows fill a GPU."""
    parts = 1
    tiles = triton.cdiv(size, FEW_ROWS_TILE.block_n)
    while parts * tiles < _ENOUGH_PROGRAMS and inner >= 2 * parts * _LEAST_PART:
        parts *= 2
    return parts


def tile_of(x: Tensor, weight: Tensor) -> Tile:
    """Return the tile for x [T, inner] and a weight [size, inner]; other tiles have its bits."""
    if x.element_size() != 2:
        return FLOAT32_TILE
    if len(x) <= _MOST_FEW_ROWS:
        return FEW_ROWS_TILE
    is_mapped = has_tensor_maps(x.device) and _can_be_mapped(x) and _can_be_mapped(weight)
    if not is_mapped:
        return MANY_ROWS_TILE
    return MAPPED_TILE if num_parts_of(*weight.shape) == 1 else MAPPED_PARTS_TILE


def _can_be_mapped(matrix: Tensor) -> bool:
    """Return whether a tensor map can describe a matrix: rows begin at multiples of 16 bytes."""
    row_bytes = matrix.stride(0) * matrix.element_size()
    is_aligned = matrix.data_ptr() % _MAP_ALIGNMENT == row_bytes % _MAP_ALIGNMENT == 0
    return is_aligned and matrix.stride(1) == 1


def multiply(
    x: Tensor, weight: Tensor, base: Tensor | None = None, output: Tensor | None = None
) -> Tensor:
    """Return x W^T, plus base, rounded once to the type of `output`.

    x: [T, inner], rows contiguous. weight: [size, inner], of any strides. base: [size] or
    [T, size], which may be the output. output: [T, size], in the type of x if it is not given.
    """
    assert x.stride(1) == 1
    output = x.new_empty(len(x), len(weight)) if output is None else output
    assert output.is_contiguous()
    multiply_by_tiles(x, weight, base, output, tile_of(x, weight))
    return output


def multiply_by_tiles(
    x: Tensor, weight: Tensor, base: Tensor | None, output: Tensor, tile: Tile
) -> None:
    """Write a product by tiles of a shape, of which the bits do not depend; see `multiply`."""
    (num_rows, inner), size = x.shape, len(weight)
    tiles = (triton.cdiv(num_rows, tile.block_m), triton.cdiv(size, tile.block_n))
    num_parts = num_parts_of(size, inner)
    is_split = num_parts > 1 and tiles[0] * tiles[1] <= _MOST_SPLIT_TILES
    target = output
    if is_split:
        target = x.new_empty(num_parts, num_rows, size, dtype=torch.float32)
    base_stride = 0 if base is None or base.dim() == 1 else base.stride(0)
    sizes = {
        "base": output if base is None else base,
        "output": target,
        "num_rows": num_rows,
        "size": size,
        "inner": inner,
        "part_size": triton.cdiv(triton.cdiv(inner, num_parts), _PART_UNIT) * _PART_UNIT,
        "base_stride": base_stride,
        "NUM_PARTS": num_parts,
        "IS_PART": is_split,
        "HAS_BASE": base is not None and not is_split,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    grid = (*tiles, num_parts if is_split else 1)
    if tile.is_mapped:
        maps = (_map_of(x, tile.block_m, tile.block_k), _map_of(weight, tile.block_n, tile.block_k))
        kernels.mapped_product[grid](*maps, **sizes)
    else:
        kernels.product[grid](x, weight, **_strides(x, weight), **sizes)
    if is_split:
        add_parts(target, base, base_stride, output)


def _strides(x: Tensor, weight: Tensor) -> dict[str, int]:
    outer, inner = weight.stride()
    return {"x_stride": x.stride(0), "outer_stride": outer, "inner_stride": inner}


def _map_of(matrix: Tensor, block_rows: int, block_columns: int) -> TensorDescriptor:
    """Return the tensor map of a matrix that is read in blocks."""
    return TensorDescriptor.from_tensor(matrix, [block_rows, block_columns])


def add_parts(parts: Tensor, base: Tensor | None, base_stride: int, output: Tensor) -> None:
    """Add parts [num_parts, T, size] in order, and the base, to `output` [T, size]."""
    num_parts, num_rows, size = parts.shape
    kernels.add_parts[(num_rows, triton.cdiv(size, _SUM_BLOCK))](
        parts,
        output if base is None else base,
        output,
        num_rows,
        size,
        base_stride,
        NUM_PARTS=num_parts,
        HAS_BASE=base is not None,
        BLOCK=_SUM_BLOCK,
        num_warps=4,
    )


def multiply_heads(x: Tensor, weight: Tensor, output: Tensor) -> None:
    """Write x_h W_h of each head h to `output` [T, heads, size], rounded once.

    x: [T, heads, inner]. weight: [heads, inner, size], contiguous. The last dimension of x and of
    the output is contiguous.
    """
    assert x.stride(2) == output.stride(2) == 1
    assert weight.is_contiguous()
    (num_rows, num_heads, inner), size = x.shape, weight.shape[2]
    tile = HEADS_TILE if x.element_size() == 2 else FLOAT32_TILE
    tiles = (triton.cdiv(num_rows, tile.block_m), triton.cdiv(size, tile.block_n))
    kernels.head_product[(*tiles, num_heads)](
        x,
        weight,
        output,
        num_rows,
        size,
        inner,
        x.stride(0),
        x.stride(1),
        output.stride(0),
        output.stride(1),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
