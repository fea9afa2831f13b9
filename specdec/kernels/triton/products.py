"""Matrix products on a GPU whose rows have the same bits in any batch.

Libraries select tiles and splits of the inner dimension by the number of rows, so that a row's
sums are added in another order beside other rows (He et al. 2025, "Defeating nondeterminism in LLM
inference"). Here both follow from the matrix alone. A few rows take a program for each part of the
inner dimension, and many one for all parts: the order of the sums is the same.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from specdec.kernels.triton.device import products as kernels

BLOCK_M, BLOCK_N, BLOCK_K = 64, 64, 64
"""Tile of every product; 64 rows are what a multiprocessor of Hopper multiplies at once."""

_ENOUGH_PROGRAMS = 256
_LEAST_PART = 512
_SUM_BLOCK = 1024


def num_parts_of(size: int, inner: int) -> int:
    """Return the parts of the inner dimension of a matrix: enough that few rows fill a GPU."""
    parts = 1
    while (
        parts * triton.cdiv(size, BLOCK_N) < _ENOUGH_PROGRAMS and inner >= 2 * parts * _LEAST_PART
    ):
        parts *= 2
    return parts


def is_split_among(num_parts: int, num_tiles: int) -> bool:
    """Return whether the parts of a product run as programs of their own, and are added behind."""
    return num_parts > 1 and num_tiles < _ENOUGH_PROGRAMS


def multiply(
    x: Tensor, weight: Tensor, base: Tensor | None = None, output: Tensor | None = None
) -> Tensor:
    """Return x W^T, plus base, rounded once to the type of `output`.

    x: [T, inner], rows contiguous. weight: [size, inner], of any strides. base: [size] or
    [T, size], which may be the output. output: [T, size], in the type of x if it is not given.
    """
    assert x.stride(1) == 1
    (num_rows, inner), size = x.shape, len(weight)
    output = x.new_empty(num_rows, size) if output is None else output
    assert output.is_contiguous()
    row_tiles, column_tiles = triton.cdiv(num_rows, BLOCK_M), triton.cdiv(size, BLOCK_N)
    num_parts = num_parts_of(size, inner)
    is_split = is_split_among(num_parts, row_tiles * column_tiles)
    target = output
    if is_split:
        target = x.new_empty(num_parts, num_rows, size, dtype=torch.float32)
    base_stride = 0 if base is None or base.dim() == 1 else base.stride(0)
    kernels.product[(row_tiles, column_tiles, num_parts if is_split else 1)](
        x,
        weight,
        output if base is None else base,
        target,
        num_rows,
        size,
        inner,
        triton.cdiv(triton.cdiv(inner, num_parts), BLOCK_K) * BLOCK_K,
        x.stride(0),
        weight.stride(0),
        weight.stride(1),
        base_stride,
        NUM_PARTS=num_parts,
        IS_PART=is_split,
        HAS_BASE=base is not None and not is_split,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=block_of_inner(x.element_size()),
        num_warps=4,
        num_stages=4,
    )
    if is_split:
        add_parts(target, base, base_stride, output)
    return output


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
    tiles = (triton.cdiv(num_rows, BLOCK_M), triton.cdiv(size, BLOCK_N))
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
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=block_of_inner(x.element_size()),
        num_warps=4,
        num_stages=3,
    )


def block_of_inner(element_size: int) -> int:
    """Return the inner size of a tile, so that four stages fit into shared memory."""
    return BLOCK_K if element_size == 2 else BLOCK_K // 2
