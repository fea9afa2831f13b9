"""Mixtures of experts: routes, tiles of the rows of each expert, and products by their matrices.

A pair is a token and one of its experts. The pairs of an expert form tiles, which programs multiply
by its matrices (grouped products, as in MegaBlocks: Gale et al. 2022, arXiv 2211.15841). The number
of tiles that are launched is that of the worst division of the pairs; programs of the others return
at once. The sums of a row follow from the matrix alone.
"""

import triton
import triton.language as tl

from specdec.kernels.triton.device.packed import NUMBERS, multiply_codes
from specdec.kernels.triton.device.products import multiply_numbers

_NONE = tl.constexpr(1 << 30)
TILE_WORDS = tl.constexpr(3)


@triton.jit
def route(
    logits,  # [num_rows, GROUPS * GROUP_SIZE]
    bias,  # float32 [GROUPS * GROUP_SIZE]; unused unless HAS_BIAS
    weights,  # float32 [num_rows, PER_TOKEN]
    chosen,  # int32 [num_rows, PER_TOKEN]
    scale,
    PER_TOKEN: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    ADDS_TWO_BEST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORMALIZES: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Choose the experts of a token, the best first and of equal ones the first; grid (num_rows,).

    Where logits are not numbers the experts are any, and the weights are not numbers either.
    """
    row = tl.program_id(0).to(tl.int64)
    groups, places = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_E)
    experts = groups[:, None] * GROUP_SIZE + places[None, :]
    is_expert = (groups < GROUPS)[:, None] & (places < GROUP_SIZE)[None, :]
    at = logits + row * (GROUPS * GROUP_SIZE) + experts
    value = tl.load(at, mask=is_expert, other=float("-inf")).to(tl.float32)
    if IS_SIGMOID:
        scores = 1 / (1 + tl.exp(-value))
    else:
        scores = tl.exp(value - tl.max(tl.max(value, 1), 0))
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias + experts, mask=is_expert, other=0.0)
    choice = tl.where(is_expert, choice, float("-inf"))
    if GROUPS > 1:
        best = tl.max(choice, 1)
        if ADDS_TWO_BEST:
            is_best = choice == best[:, None]
            first = tl.min(tl.where(is_best, experts, _NONE), 1)
            best += tl.max(tl.where(experts == first[:, None], float("-inf"), choice), 1)
            best = tl.where(groups < GROUPS, best, float("-inf"))
        is_kept = tl.zeros([BLOCK_G], tl.int32)
        for _ in tl.static_range(CHOSEN_GROUPS):
            group = tl.min(tl.where(best == tl.max(best, 0), groups, _NONE), 0)
            is_kept = tl.where(groups == group, 1, is_kept)
            best = tl.where(groups == group, float("-inf"), best)
        choice = tl.where((is_kept > 0)[:, None], choice, float("-inf"))
    tokens = tl.arange(0, BLOCK_T)
    own_weights = tl.zeros([BLOCK_T], tl.float32)
    own_experts = tl.zeros([BLOCK_T], tl.int32)
    for index in tl.static_range(PER_TOKEN):
        is_best = choice == tl.max(tl.max(choice, 1), 0)
        expert = tl.min(tl.min(tl.where(is_best, experts, _NONE), 1), 0)
        expert = tl.minimum(expert, GROUPS * GROUP_SIZE - 1)
        score = tl.sum(tl.sum(tl.where(experts == expert, scores, 0.0), 1), 0)
        own_weights = tl.where(tokens == index, score, own_weights)
        own_experts = tl.where(tokens == index, expert, own_experts)
        choice = tl.where(experts == expert, float("-inf"), choice)
    if NORMALIZES:
        own_weights = own_weights / tl.sum(own_weights, 0)
    at = row * PER_TOKEN + tokens
    tl.store(weights + at, own_weights * scale, mask=tokens < PER_TOKEN)
    tl.store(chosen + at, own_experts, mask=tokens < PER_TOKEN)


@triton.jit(do_not_specialize=("num_pairs", "first_expert", "num_tiles"))
def plan_tiles(
    chosen,  # int32 [num_pairs]
    order,  # int32 [num_pairs]: the pairs of each expert, one expert after the other
    tiles,  # int32 [num_tiles, 3]: expert, or -1 for none; first place in `order`, and their end
    num_pairs,
    first_expert,
    num_tiles,
    IS_SPARSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Order the pairs of an expert, and divide them into tiles of BLOCK_M; grid (num_experts,).

    With p pairs before those of expert e, its tiles begin at p / BLOCK_M + e, so that each has
    a place whatever the others have. IS_SPARSE: at p, where that needs fewer tiles.
    """
    own, num_experts = tl.program_id(0), tl.num_programs(0)
    lanes = tl.arange(0, BLOCK_P)
    before = tl.zeros([BLOCK_P], tl.int32)
    count = tl.zeros([BLOCK_P], tl.int32)
    for block in range(0, num_pairs, BLOCK_P):
        at = block + lanes
        expert = tl.load(chosen + at, mask=at < num_pairs, other=_NONE) - first_expert
        before += tl.where((expert >= 0) & (expert < own), 1, 0)
        count += tl.where(expert == own, 1, 0)
    start = tl.sum(before, 0)
    end = start + tl.sum(count, 0)
    place = start
    for block in range(0, num_pairs, BLOCK_P):
        at = block + lanes
        expert = tl.load(chosen + at, mask=at < num_pairs, other=_NONE) - first_expert
        is_own = tl.where(expert == own, 1, 0)
        tl.store(order + place + tl.cumsum(is_own, 0) - 1, at, mask=is_own > 0)
        place += tl.sum(is_own, 0)
    first_tile = start if IS_SPARSE else start // BLOCK_M + own
    next_tile = end if IS_SPARSE else end // BLOCK_M + own + 1
    next_tile = tl.where(own == num_experts - 1, num_tiles, next_tile)
    for block in range(first_tile, next_tile, BLOCK_P):
        tile = block + lanes
        first = start + (tile - first_tile) * BLOCK_M
        at, is_tile = tiles + tile * TILE_WORDS, tile < next_tile
        tl.store(at, tl.where(first < end, own, -1), mask=is_tile)
        tl.store(at + 1, first, mask=is_tile)
        tl.store(at + 2, end + tl.zeros([BLOCK_P], tl.int32), mask=is_tile)


@triton.jit
def activate(gate, up, IS_CLAMPED: tl.constexpr):
    """Return the hidden units of gates and others, as `kernels.reference.experts.run_experts`."""
    if IS_CLAMPED:
        gate = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -7.0, 7.0, propagate_nan=tl.PropagateNan.ALL)
        return (up + 1) * gate / (1 + tl.exp(-1.702 * gate))
    else:
        return gate / (1 + tl.exp(-gate)) * up


@triton.jit
def pairs_of_tile(tile, order, BLOCK_M: tl.constexpr):
    """Return the places of a tile's pairs in `order`, which of them there are, and the pairs."""
    places = tl.load(tile + 1) + tl.arange(0, BLOCK_M)
    is_row = places < tl.load(tile + 2)
    return places, is_row, tl.load(order + places, mask=is_row, other=0)


@triton.jit
def own_columns(size, BLOCK_N: tl.constexpr):
    """Return the columns of a program's tile, and which of them there are."""
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    return columns, columns < size


@triton.jit
def matrix_index(expert, KIND: tl.constexpr):
    """Return the index of an expert's matrix, in 64 bits where that needs fewer registers."""
    return expert.to(tl.int64) if KIND == NUMBERS else expert


@triton.jit
def hidden_units(
    x,  # [num_rows, inner], rows `x_stride` apart
    gate_up,  # of [num_experts * 2 * size, inner]; numbers, or codes as in `packed`
    scales,  # these three unused with numbers
    zeros,
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
    """Compute hidden units of the pairs of a tile; grid (num_tiles, ceil(size / BLOCK_N))."""
    tile = tiles + tl.program_id(0) * TILE_WORDS
    expert = tl.load(tile)
    if expert >= 0:
        places, is_row, pairs = pairs_of_tile(tile, order, BLOCK_M)
        columns, is_column = own_columns(size, BLOCK_N)
        of_rows = x + (pairs // PER_TOKEN).to(tl.int64)[:, None] * x_stride
        of_gates = matrix_index(expert, KIND) * (2 * size) + columns
        if KIND == NUMBERS:
            at_gates = gate_up + of_gates[None, :] * inner
            at_ups = gate_up + (of_gates + size)[None, :] * inner
            gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for block in range(0, inner, BLOCK_K):
                inputs = block + tl.arange(0, BLOCK_K)
                is_input = inputs < inner
                is_left = is_row[:, None] & is_input[None, :]
                left = tl.load(of_rows + inputs[None, :], mask=is_left, other=0.0)
                is_right = is_input[:, None] & is_column[None, :]
                gates = tl.load(at_gates + inputs[:, None], mask=is_right, other=0.0)
                gate = tl.dot(left, gates, gate, input_precision="ieee")
                ups = tl.load(at_ups + inputs[:, None], mask=is_right, other=0.0)
                up = tl.dot(left, ups, up, input_precision="ieee")
        else:
            gate = multiply_codes(
                of_rows, is_row, gate_up, scales, zeros, of_gates, is_column, 0, inner, inner,
                group_size, num_groups, BLOCK_M, BLOCK_N, BLOCK_K, KIND, HAS_ZEROS, IS_COARSE,
            )  # fmt: skip
            up = multiply_codes(
                of_rows, is_row, gate_up, scales, zeros, of_gates + size, is_column, 0, inner,
                inner, group_size, num_groups, BLOCK_M, BLOCK_N, BLOCK_K, KIND, HAS_ZEROS,
                IS_COARSE,
            )  # fmt: skip
        if HAS_BIAS:
            own = bias + of_gates
            gate += tl.load(own, mask=is_column, other=0.0).to(tl.float32)[None, :]
            up += tl.load(own + size, mask=is_column, other=0.0).to(tl.float32)[None, :]
        at = output + places.to(tl.int64)[:, None] * size + columns[None, :]
        tl.store(at, activate(gate, up, IS_CLAMPED), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def expert_results(
    units,  # [num_pairs, inner], in the order of `order`
    down,  # of [num_experts * size, inner]; this and the next two as in `hidden_units`
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
    """Compute the results of the pairs of a tile; grid (num_tiles, ceil(size / BLOCK_N))."""
    tile = tiles + tl.program_id(0) * TILE_WORDS
    expert = tl.load(tile)
    if expert >= 0:
        places, is_row, pairs = pairs_of_tile(tile, order, BLOCK_M)
        columns, is_column = own_columns(size, BLOCK_N)
        of_rows = units + places.to(tl.int64)[:, None] * inner
        of_outputs = matrix_index(expert, KIND) * size + columns
        if KIND == NUMBERS:
            of_columns = down + of_outputs[None, :] * inner
            total = multiply_numbers(
                of_rows, of_columns, is_row, is_column, 0, inner, inner, 1, BLOCK_K
            )
        else:
            total = multiply_codes(
                of_rows, is_row, down, scales, zeros, of_outputs, is_column, 0, inner, inner,
                group_size, num_groups, BLOCK_M, BLOCK_N, BLOCK_K, KIND, HAS_ZEROS, IS_COARSE,
            )  # fmt: skip
        if HAS_BIAS:
            own = tl.load(bias + of_outputs, mask=is_column, other=0.0)
            total += own.to(tl.float32)[None, :]
        at = output + pairs.to(tl.int64)[:, None] * size + columns[None, :]
        tl.store(at, total, mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=("first_expert", "num_experts"))
def add_results(
    results,  # [num_rows * PER_TOKEN, size]
    weights,  # float32 [num_rows, PER_TOKEN]
    chosen,  # int32 [num_rows, PER_TOKEN]
    base,  # [num_rows, size]; unused unless HAS_BASE
    output,  # [num_rows, size]
    size,
    first_expert,
    num_experts,
    PER_TOKEN: tl.constexpr,
    HAS_BASE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the results of a token's experts, the best first; grid (num_rows, ceil(size / BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < size
    total = tl.zeros([BLOCK], tl.float32)
    if HAS_BASE:
        total += tl.load(base + row * size + columns, mask=is_column, other=0.0).to(tl.float32)
    for index in tl.static_range(PER_TOKEN):
        pair = row * PER_TOKEN + index
        expert = tl.load(chosen + pair) - first_expert
        is_own = (expert >= 0) & (expert < num_experts)
        weight = tl.load(weights + pair)
        result = tl.load(results + pair * size + columns, mask=is_column & is_own, other=0.0)
        total += tl.where(is_own, weight * result.to(tl.float32), 0.0)
    tl.store(output + row * size + columns, total, mask=is_column)
