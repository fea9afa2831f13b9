"""Products of experts in few bits, for tiles of pairs as in `experts`."""

import triton
import triton.language as tl

from specdec.kernels.triton.device.experts import TILE_WORDS, activate
from specdec.kernels.triton.device.packed import INT4, byte_product, int4_product


@triton.jit
def multiply_codes(
    of_rows,  # [BLOCK_M, 1] addresses
    is_row,
    codes,  # of all experts, one below the other; scales and zeros too
    scales,
    zeros,
    columns,  # [BLOCK_N], rows of the codes
    is_column,
    inner,
    group_size,
    num_groups,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    KIND: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    IS_COARSE: tl.constexpr,
):
    """Return the products of rows and columns, [BLOCK_M, BLOCK_N]."""
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in range(0, inner, BLOCK_K):
        if KIND == INT4:
            total += int4_product(
                of_rows, is_row, codes, scales, zeros, columns, is_column, block, inner,
                group_size, num_groups, BLOCK_M, BLOCK_N, BLOCK_K, HAS_ZEROS, IS_COARSE,
            )  # fmt: skip
        else:
            total += byte_product(
                of_rows, is_row, codes, scales, columns, is_column, block, inner,
                group_size, num_groups, BLOCK_M, BLOCK_N, BLOCK_K, KIND, IS_COARSE,
            )  # fmt: skip
    return total


@triton.jit
def packed_hidden_units(
    x,  # [num_rows, inner], rows `x_stride` apart
    codes,  # of [num_experts * 2 * size, inner]
    scales,
    zeros,  # unused unless HAS_ZEROS
    bias,  # [num_experts, 2 * size]; unused unless HAS_BIAS
    order,
    tiles,
    output,  # [num_pairs, size], in the order of `order`
    size,
    inner,
    group_size,
    num_groups,
    x_stride,
    PER_TOKEN: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    IS_COARSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute hidden units of the pairs of a tile, as `experts.hidden_units`."""
    tile = tiles + tl.program_id(0) * TILE_WORDS
    expert = tl.load(tile)
    if expert >= 0:
        places = tl.load(tile + 1) + tl.arange(0, BLOCK_M)
        is_row = places < tl.load(tile + 2)
        pairs = tl.load(order + places, mask=is_row, other=0)
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = columns < size
        of_rows = x + (pairs // PER_TOKEN).to(tl.int64)[:, None] * x_stride
        of_gates = expert * (2 * size) + columns
        gate = multiply_codes(
            of_rows, is_row, codes, scales, zeros, of_gates, is_column, inner, group_size,
            num_groups, BLOCK_M, BLOCK_N, BLOCK_K, KIND, HAS_ZEROS, IS_COARSE,
        )  # fmt: skip
        up = multiply_codes(
            of_rows, is_row, codes, scales, zeros, of_gates + size, is_column, inner, group_size,
            num_groups, BLOCK_M, BLOCK_N, BLOCK_K, KIND, HAS_ZEROS, IS_COARSE,
        )  # fmt: skip
        if HAS_BIAS:
            own = bias + of_gates
            gate += tl.load(own, mask=is_column, other=0.0).to(tl.float32)[None, :]
            up += tl.load(own + size, mask=is_column, other=0.0).to(tl.float32)[None, :]
        at = output + places.to(tl.int64)[:, None] * size + columns[None, :]
        is_output = is_row[:, None] & is_column[None, :]
        tl.store(at, activate(gate, up, IS_CLAMPED), mask=is_output)


@triton.jit
def packed_expert_results(
    units,  # [num_pairs, inner], in the order of `order`
    codes,  # of [num_experts * size, inner]
    scales,
    zeros,
    bias,  # [num_experts, size]; unused unless HAS_BIAS
    order,
    tiles,
    output,  # [num_pairs, size], in the order of the pairs
    size,
    inner,
    group_size,
    num_groups,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    IS_COARSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute the results of the pairs of a tile, as `experts.expert_results`."""
    tile = tiles + tl.program_id(0) * TILE_WORDS
    expert = tl.load(tile)
    if expert >= 0:
        places = tl.load(tile + 1) + tl.arange(0, BLOCK_M)
        is_row = places < tl.load(tile + 2)
        pairs = tl.load(order + places, mask=is_row, other=0)
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = columns < size
        of_rows = units + places.to(tl.int64)[:, None] * inner
        of_outputs = expert * size + columns
        total = multiply_codes(
            of_rows, is_row, codes, scales, zeros, of_outputs, is_column, inner, group_size,
            num_groups, BLOCK_M, BLOCK_N, BLOCK_K, KIND, HAS_ZEROS, IS_COARSE,
        )  # fmt: skip
        if HAS_BIAS:
            own = tl.load(bias + of_outputs, mask=is_column, other=0.0)
            total += own.to(tl.float32)[None, :]
        at = output + pairs.to(tl.int64)[:, None] * size + columns[None, :]
        tl.store(at, total, mask=is_row[:, None] & is_column[None, :])
