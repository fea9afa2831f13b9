"""Products by weights in few bits, which become numbers in registers, and their dequantization.

Tiles have one shape for any number of rows, and the inner dimension is divided into parts at fixed
places, as in `products`: the order of a row's sums does not depend on its batch.
"""

import triton
import triton.language as tl

from specdec.kernels.triton.device.products import store_tile

NUMBERS = tl.constexpr(0)  # no codes
INT4 = tl.constexpr(4)
INT8 = tl.constexpr(8)
FLOAT8 = tl.constexpr(1)
_WORD = tl.constexpr(8)
WORD_ALIGNMENT = tl.constexpr(4)
"""Words of 16 bytes, which are copied at once."""
_E4M3_SCALE = tl.constexpr(1.329227995784916e36)  # 2^120


@triton.jit
def float8_values(codes):
    """Return the values of fp8_e4m3 codes, which are uint8, in float32.

    The four bits of the exponent and the three of the mantissa are those of a float32 whose
    exponent is too small by 120; its subnormal values are the subnormal ones of fp8. Every GPU can
    do this, and only those from sm_89 on can convert the type.
    """
    codes = codes.to(tl.uint32)
    bits = ((codes & 128) << 24) | ((codes & 127) << 20)
    return bits.to(tl.float32, bitcast=True) * _E4M3_SCALE


@triton.jit
def load_scales(scales, columns, is_column, groups, num_groups, is_group):
    """Return scales [groups, columns] in float32; groups: index by input."""
    at = scales + columns.to(tl.int64)[None, :] * num_groups + groups[:, None]
    return tl.load(at, mask=is_group[:, None] & is_column[None, :], other=0.0).to(tl.float32)


@triton.jit
def load_zeros(zeros, columns, is_column, groups, num_groups, is_group, HAS_ZEROS: tl.constexpr):
    """Return zero points [groups, columns] in int32, or 8."""
    if HAS_ZEROS:
        at = zeros + columns.to(tl.int64)[None, :] * num_groups + groups[:, None]
        return tl.load(at, mask=is_group[:, None] & is_column[None, :], other=0).to(tl.int32)
    else:
        return tl.full([1, 1], 8, tl.int32)


@triton.jit
def eighths(rows, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the columns of [BLOCK_M, BLOCK_K] whose index is 0, 1, ... 7 modulo 8.

    The rows are loaded as they are stored, 16 bytes at once, and eight columns are of one thread.
    """
    even, odd = tl.split(rows.reshape(BLOCK_M, BLOCK_K // 2, 2))
    first, third = tl.split(even.reshape(BLOCK_M, BLOCK_K // 4, 2))
    second, fourth = tl.split(odd.reshape(BLOCK_M, BLOCK_K // 4, 2))
    c0, c4 = tl.split(first.reshape(BLOCK_M, BLOCK_K // 8, 2))
    c1, c5 = tl.split(second.reshape(BLOCK_M, BLOCK_K // 8, 2))
    c2, c6 = tl.split(third.reshape(BLOCK_M, BLOCK_K // 8, 2))
    c3, c7 = tl.split(fourth.reshape(BLOCK_M, BLOCK_K // 8, 2))
    return c0, c1, c2, c3, c4, c5, c6, c7


@triton.jit
def int4_product(
    of_rows,  # [BLOCK_M, 1] addresses of the rows of x
    is_row,
    codes,  # int32 [size, inner / 8]
    scales,
    zeros,
    columns,
    is_column,
    block,  # first input
    inner,
    group_size,
    num_groups,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    IS_COARSE: tl.constexpr,
):
    """Return the product of BLOCK_K inputs: one of each eighth input for each code of the words.

    So a word is loaded once and never moves between threads. IS_COARSE: all inputs have one group,
    whose scale is applied to the sum, and the words of a row begin at a multiple of
    WORD_ALIGNMENT; else the group of each word has its own.
    """
    words = tl.multiple_of(block // _WORD, BLOCK_K // _WORD) + tl.arange(0, BLOCK_K // _WORD)
    num_words = inner // _WORD
    if IS_COARSE:
        num_words = tl.multiple_of(num_words, WORD_ALIGNMENT)
    is_word = words < num_words
    at = codes + columns.to(tl.int64)[None, :] * num_words + words[:, None]
    packed = tl.load(at, mask=is_word[:, None] & is_column[None, :], other=0)
    if IS_COARSE:
        groups = block // group_size + tl.zeros([1], tl.int32)
        is_group = groups >= 0
    else:
        groups = words * _WORD // group_size
        is_group = is_word
    factor = load_scales(scales, columns, is_column, groups, num_groups, is_group)
    zero = load_zeros(zeros, columns, is_column, groups, num_groups, is_group, HAS_ZEROS)
    places = block + tl.arange(0, BLOCK_K)
    is_read = is_row[:, None] & (places < inner)[None, :]
    left = tl.load(of_rows + places[None, :], mask=is_read, other=0.0)
    lefts = eighths(left, BLOCK_M, BLOCK_K)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for place in tl.static_range(_WORD):
        code = (((packed >> (4 * place)) & 15) - zero).to(tl.float32)
        if not IS_COARSE:
            code = code * factor
        total = tl.dot(lefts[place], code.to(left.dtype), total, input_precision="ieee")
    if IS_COARSE:
        total = total * factor
    return total


@triton.jit
def byte_product(
    of_rows,
    is_row,
    codes,  # int8, or uint8 of fp8_e4m3, [size, inner]
    scales,
    columns,
    is_column,
    block,
    inner,
    group_size,
    num_groups,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    KIND: tl.constexpr,
    IS_COARSE: tl.constexpr,
):
    """Return the product of BLOCK_K inputs; IS_COARSE as in `int4_product`."""
    places = block + tl.arange(0, BLOCK_K)
    is_place = places < inner
    left = tl.load(of_rows + places[None, :], mask=is_row[:, None] & is_place[None, :], other=0.0)
    at = codes + columns.to(tl.int64)[None, :] * inner + places[:, None]
    code = tl.load(at, mask=is_place[:, None] & is_column[None, :], other=0)
    values = float8_values(code) if KIND == FLOAT8 else code.to(tl.float32)
    if IS_COARSE:
        groups = block // group_size + tl.zeros([1], tl.int32)
        factor = load_scales(scales, columns, is_column, groups, num_groups, groups >= 0)
        return tl.dot(left, values.to(left.dtype), input_precision="ieee") * factor
    else:
        groups = places // group_size
        factor = load_scales(scales, columns, is_column, groups, num_groups, is_place)
        return tl.dot(left, (values * factor).to(left.dtype), input_precision="ieee")


@triton.jit
def multiply_codes(
    of_rows,  # [BLOCK_M, 1] addresses
    is_row,
    codes,
    scales,
    zeros,
    columns,  # [BLOCK_N], rows of the codes
    is_column,
    start,  # first input, a multiple of BLOCK_K
    end,  # input after the last one
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
    """Return the products [BLOCK_M, BLOCK_N] of rows and columns over a range of inputs."""
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in range(start, end, BLOCK_K):
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


@triton.jit(do_not_specialize=("num_rows",))
def packed_product(
    x,  # [num_rows, inner], rows `x_stride` apart
    codes,
    scales,  # [size, num_groups]
    zeros,  # uint8 [size, num_groups]; unused unless HAS_ZEROS
    base,  # [num_rows, size] or, with a stride of 0, [size]; unused unless HAS_BASE
    output,  # [num_rows, size], or float32 [NUM_PARTS, num_rows, size] where IS_PART
    num_rows,
    size,
    inner,
    group_size,
    num_groups,
    part_size,  # of the inner dimension, a multiple of BLOCK_K
    x_stride,
    base_stride,
    KIND: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    IS_PART: tl.constexpr,
    HAS_BASE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    IS_COARSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply a tile; grid (row tiles, column tiles, NUM_PARTS where IS_PART, else 1)."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < num_rows, columns < size
    of_rows = x + rows.to(tl.int64)[:, None] * x_stride
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for index in range(1 if IS_PART else NUM_PARTS):
        start = (tl.program_id(2) + index) * part_size
        end = tl.minimum(start + part_size, inner)
        total += multiply_codes(
            of_rows, is_row, codes, scales, zeros, columns, is_column, start, end, inner,
            group_size, num_groups, BLOCK_M, BLOCK_N, BLOCK_K, KIND, HAS_ZEROS, IS_COARSE,
        )  # fmt: skip
    store_tile(
        total, base, output, rows, columns, is_row, is_column, tl.program_id(2), num_rows, size,
        base_stride, IS_PART, HAS_BASE,
    )  # fmt: skip


@triton.jit
def dequantize(
    codes,
    scales,
    zeros,
    output,  # [size, inner]
    size,
    inner,
    group_size,
    num_groups,
    KIND: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write the values of a tile; grid (ceil(size / BLOCK_N), ceil(inner / BLOCK_K))."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    places = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    is_column, is_place = columns < size, places < inner
    is_read = is_place[:, None] & is_column[None, :]
    groups = places // group_size
    if KIND == INT4:
        at = codes + columns.to(tl.int64)[None, :] * (inner // _WORD) + places[:, None] // _WORD
        words = tl.load(at, mask=is_read, other=0)
        zero = load_zeros(zeros, columns, is_column, groups, num_groups, is_place, HAS_ZEROS)
        values = (((words >> (4 * (places % _WORD))[:, None]) & 15) - zero).to(tl.float32)
    else:
        at = codes + columns.to(tl.int64)[None, :] * inner + places[:, None]
        code = tl.load(at, mask=is_read, other=0)
        values = float8_values(code) if KIND == FLOAT8 else code.to(tl.float32)
    values *= load_scales(scales, columns, is_column, groups, num_groups, is_place)
    at = output + columns.to(tl.int64)[None, :] * inner + places[:, None]
    tl.store(at, values, mask=is_read)


@triton.jit
def float8_sums(of_rows, of_columns, is_row, is_column, block, inner, BLOCK_K: tl.constexpr):
    """Return the products of BLOCK_K inputs of rows and columns, without scales."""
    places = block + tl.arange(0, BLOCK_K)
    is_place = places < inner
    left = tl.load(of_rows + places[None, :], mask=is_row[:, None] & is_place[None, :], other=0.0)
    is_right = is_place[:, None] & is_column[None, :]
    right = tl.load(of_columns + places[:, None], mask=is_right, other=0.0)
    return tl.dot(left, right)


@triton.jit(do_not_specialize=("num_rows",))
def float8_product(
    x,  # float8 [num_rows, inner]
    x_scales,  # float32 [num_rows, num_x_groups]
    codes,  # float8 [size, inner]
    scales,  # float32 [size, num_groups]
    base,
    output,
    num_rows,
    size,
    inner,
    group_size,
    num_groups,
    x_group_size,
    num_x_groups,
    part_size,
    base_stride,
    NUM_PARTS: tl.constexpr,
    IS_PART: tl.constexpr,
    HAS_BASE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply a tile of 8-bit floats by 8-bit floats; grid and parts as in `packed_product`.

    A group of inputs is a multiple of BLOCK_K, or all inputs. The sum of BLOCK_K inputs is scaled
    and added in float32: the matrix units of Hopper add 8-bit products with 14 bits only (DeepSeek
    2024, arXiv 2412.19437, section 3.3.2).
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < num_rows, columns < size
    of_rows = x + rows.to(tl.int64)[:, None] * inner
    of_columns = codes + columns.to(tl.int64)[None, :] * inner
    at_scales = scales + columns.to(tl.int64) * num_groups
    at_x_scales = x_scales + rows.to(tl.int64) * num_x_groups
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for index in range(1 if IS_PART else NUM_PARTS):
        start = (tl.program_id(2) + index) * part_size
        part = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for block in range(start, tl.minimum(start + part_size, inner), BLOCK_K):
            factor = tl.load(at_scales + block // group_size, mask=is_column, other=0.0)
            x_factor = tl.load(at_x_scales + block // x_group_size, mask=is_row, other=0.0)
            sums = float8_sums(of_rows, of_columns, is_row, is_column, block, inner, BLOCK_K)
            part += sums * (x_factor[:, None] * factor[None, :])
        total += part
    store_tile(
        total, base, output, rows, columns, is_row, is_column, tl.program_id(2), num_rows, size,
        base_stride, IS_PART, HAS_BASE,
    )  # fmt: skip
