"""Products of experts in few bits, for tiles of pairs as in `experts`."""

import triton
import triton.language as tl

from specdec.kernels.triton.device.experts import (
    TILE_WORDS,
    own_columns,
    pairs_of_tile,
    store_results,
    store_units,
)
from specdec.kernels.triton.device.packed import multiply_codes


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
        places, is_row, pairs = pairs_of_tile(tile, order, BLOCK_M)
        columns, is_column = own_columns(size, BLOCK_N)
        of_rows = x + (pairs // PER_TOKEN).to(tl.int64)[:, None] * x_stride
        of_gates = expert * (2 * size) + columns
        gate = multiply_codes(
            of_rows, is_row, codes, scales, zeros, of_gates, is_column, 0, inner, inner,
            group_size, num_groups, BLOCK_M, BLOCK_N, BLOCK_K, KIND, HAS_ZEROS, IS_COARSE,
        )  # fmt: skip
        up = multiply_codes(
            of_rows, is_row, codes, scales, zeros, of_gates + size, is_column, 0, inner, inner,
            group_size, num_groups, BLOCK_M, BLOCK_N, BLOCK_K, KIND, HAS_ZEROS, IS_COARSE,
        )  # fmt: skip
        store_units(
            gate, up, bias, of_gates, output, places, columns, is_row, is_column, size,
            IS_CLAMPED, HAS_BIAS,
        )  # fmt: skip


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
        places, is_row, pairs = pairs_of_tile(tile, order, BLOCK_M)
        columns, is_column = own_columns(size, BLOCK_N)
        of_rows = units + places.to(tl.int64)[:, None] * inner
        of_outputs = expert * size + columns
        total = multiply_codes(
            of_rows, is_row, codes, scales, zeros, of_outputs, is_column, 0, inner, inner,
            group_size, num_groups, BLOCK_M, BLOCK_N, BLOCK_K, KIND, HAS_ZEROS, IS_COARSE,
        )  # fmt: skip
        store_results(
            total, bias, of_outputs, output, pairs, columns, is_row, is_column, size, HAS_BIAS
        )
