"""Products on a GPU by weights that stay in few bits; `PackedWeight.values` is the reference.

A few rows, of decodes and drafts, read the codes and make numbers of them in registers: the time is
that of the codes' bytes. For many rows, whose time is that of the arithmetic, the weight is
dequantized once and multiplied by a library. 8-bit floats are multiplied as they are, by rows that
are quantized to 8-bit floats themselves, where the GPU has products of them.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from specdec.kernels.reference.packed_weight import CodeKind, PackedWeight
from specdec.kernels.triton.device import packed as kernels
from specdec.kernels.triton.products import add_parts, num_parts_of
from specdec.kernels.triton.rows import quantize_rows

BLOCK_N = 64
BLOCK_K = {CodeKind.INT4: 128, CodeKind.INT8: 64, CodeKind.FLOAT8: 64}
"""Inputs that a program multiplies at once; of 4-bit codes an eighth of them by each product."""
FLOAT8_BLOCK_K = 128
STAGES = 5
"""Tiles of codes that a program has asked for at once: few bytes each."""

MOST_FEW_ROWS = {CodeKind.INT4: 16, CodeKind.INT8: 64, CodeKind.FLOAT8: 64}
"""Rows that are multiplied by codes; a dequantized weight is written and read again in 16 bits.

A step of 8B on an H100 takes 7 ms by 4-bit codes with 8 rows and 41 ms with 48, 24 ms dequantized
with 320; by 8-bit integers 9 ms with 48 rows and 12 ms with 64.
"""

KINDS = {CodeKind.INT4: 4, CodeKind.INT8: 8, CodeKind.FLOAT8: 1}
"""Constants of the kernels."""

_DEQUANTIZED_TILE = (32, 128)
_ENOUGH_TILES = 256
"""Tiles from which on one program adds all parts of a tile."""
_FIRST_WITH_FLOAT8 = (8, 9)


@cache
def has_float8_products(device: torch.device) -> bool:
    """Return whether a device multiplies 8-bit floats: GPUs from sm_89 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST_WITH_FLOAT8


def multiply(
    x: Tensor, weight: PackedWeight, base: Tensor | None = None, output: Tensor | None = None
) -> Tensor:
    """Return x W^T, plus base, rounded once to the type of `output`; of any number of rows.

    x: [T, inner], rows contiguous, columns in the order of the codes. base: [size] or [T, size].
    output: [T, size], in the type of x if it is not given. A row's bits do not depend on others.
    """
    assert x.stride(1) == 1
    kind, (size, inner) = weight.kind, weight.shape
    block_k = BLOCK_K[kind]
    output = x.new_empty(len(x), size) if output is None else output
    grid = _Grid(len(x), size, inner, block_k)
    target, base_stride = grid.target(output), _row_stride(base)
    kernels.packed_product[grid.programs](
        x,
        integers_of(weight),
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        output if base is None else base,
        target,
        len(x),
        size,
        inner,
        weight.group_size,
        weight.scales.shape[1],
        grid.part_size,
        x.stride(0),
        base_stride,
        KIND=KINDS[kind],
        **grid.constants(has_base=base is not None),
        HAS_ZEROS=weight.zeros is not None,
        IS_COARSE=is_coarse(weight, block_k),
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=STAGES,
    )
    if grid.is_split:
        add_parts(target, base, base_stride, output)
    return output


def multiply_float8(
    x: Tensor, weight: PackedWeight, base: Tensor | None = None, output: Tensor | None = None
) -> Tensor:
    """Return x W^T, plus base, by 8-bit floats; the rows of x have own scales.

    Arguments: see `multiply`; a weight whose groups `fits_float8_products`. Where the weight has
    scales by group of inputs, so have the rows.
    """
    inner, group = weight.shape[1], weight.group_size
    rows = x if group >= inner else _grouped(x, group)
    quantized, x_scales = quantize_rows(rows, torch.float8_e4m3fn)
    values = quantized.view(torch.uint8).view(len(x), -1)[:, :inner].contiguous()
    values = values.view(torch.float8_e4m3fn)
    return float8_product(values, x_scales, weight, base, output, x.dtype)


def float8_product(
    x: Tensor,  # float8 [T, inner]
    x_scales: Tensor,  # [T * groups] float32
    weight: PackedWeight,
    base: Tensor | None,
    output: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the product of rows that are quantized already, in `dtype` or that of the output."""
    (size, inner), num_rows = weight.shape, len(x)
    if output is None:
        output = torch.empty(num_rows, size, dtype=dtype, device=x.device)
    grid = _Grid(num_rows, size, inner, FLOAT8_BLOCK_K)
    target, base_stride = grid.target(output), _row_stride(base)
    kernels.float8_product[grid.programs](
        x,
        x_scales,
        weight.codes,
        weight.scales,
        output if base is None else base,
        target,
        num_rows,
        size,
        inner,
        weight.group_size,
        weight.scales.shape[1],
        weight.group_size,
        len(x_scales) // num_rows,
        grid.part_size,
        base_stride,
        **grid.constants(has_base=base is not None),
        BLOCK_K=FLOAT8_BLOCK_K,
        num_warps=4,
        num_stages=3,
    )
    if grid.is_split:
        add_parts(target, base, base_stride, output)
    return output


def _grouped(x: Tensor, group: int) -> Tensor:
    """Return rows of groups of inputs, [T * groups, group], the last one of each row padded."""
    padding = -x.shape[1] % group
    padded = torch.nn.functional.pad(x, (0, padding)) if padding else x
    return padded.reshape(-1, group)


def dequantize(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Return the weight [size, inner], columns in the order of the codes, in one pass."""
    (size, inner), (block_n, block_k) = weight.shape, _DEQUANTIZED_TILE
    output = torch.empty(size, inner, dtype=dtype, device=weight.codes.device)
    kernels.dequantize[(triton.cdiv(size, block_n), triton.cdiv(inner, block_k))](
        integers_of(weight),
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        output,
        size,
        inner,
        weight.group_size,
        weight.scales.shape[1],
        KIND=KINDS[weight.kind],
        HAS_ZEROS=weight.zeros is not None,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4,
    )
    return output


def fits_float8_products(weight: PackedWeight) -> bool:
    """Return whether a weight of 8-bit floats can be multiplied by others."""
    return weight.kind is CodeKind.FLOAT8 and is_coarse(weight, FLOAT8_BLOCK_K)


def is_coarse(weight: PackedWeight, block_k: int) -> bool:
    """Return whether the inputs that a program multiplies at once have one group.

    Of 4-bit codes the words of each output have to begin at multiples of 16 bytes, too.
    """
    words = weight.codes.shape[1]
    if weight.kind is CodeKind.INT4 and words % kernels.WORD_ALIGNMENT.value:
        return False
    return weight.group_size % block_k == 0 or weight.group_size >= weight.shape[1]


class _Grid:
    """The programs of a product: the parts follow from the matrix alone.

    block_m: rows of a tile. Tiles of 16 and 32 rows are multiplied by the same instruction.
    """

    def __init__(self, num_rows: int, size: int, inner: int, block_k: int) -> None:
        self.block_m = 16 if num_rows <= 16 else 32
        tiles = (triton.cdiv(num_rows, self.block_m), triton.cdiv(size, BLOCK_N))
        self.num_parts = num_parts_of(size, inner)
        self.is_split = self.num_parts > 1 and tiles[0] * tiles[1] < _ENOUGH_TILES
        self.part_size = triton.cdiv(triton.cdiv(inner, self.num_parts), block_k) * block_k
        self.programs = (*tiles, self.num_parts if self.is_split else 1)

    def constants(self, *, has_base: bool) -> dict[str, int]:
        """Return the constants of every kernel of products."""
        return {
            "NUM_PARTS": self.num_parts,
            "IS_PART": self.is_split,
            "HAS_BASE": has_base and not self.is_split,
            "BLOCK_M": self.block_m,
            "BLOCK_N": BLOCK_N,
        }

    def target(self, output: Tensor) -> Tensor:
        """Return where the programs write: the output, or parts [num_parts, T, size]."""
        assert output.is_contiguous()
        if not self.is_split:
            return output
        return output.new_empty(self.num_parts, *output.shape, dtype=torch.float32)


def _row_stride(base: Tensor | None) -> int:
    return 0 if base is None or base.dim() == 1 else base.stride(0)


def integers_of(weight: PackedWeight) -> Tensor:
    """Return the codes as the kernels read them: those of 8-bit floats as bytes."""
    return weight.codes.view(torch.uint8) if weight.kind is CodeKind.FLOAT8 else weight.codes
