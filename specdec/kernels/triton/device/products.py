"""Matrix products whose sums do not depend on the number of rows.

The inner dimension is divided into parts at fixed places, which are added in order: by one program,
or by a second kernel. A part is summed in ascending order of its elements by any tile.
"""

import triton
import triton.language as tl


@triton.jit
def store_tile(
    total,  # [BLOCK_M, BLOCK_N]
    base,
    output,
    rows,
    columns,
    is_row,
    is_column,
    own_part,
    num_rows,
    size,
    base_stride,
    IS_PART: tl.constexpr,
    HAS_BASE: tl.constexpr,
):
    """Write a tile of a product, plus the base, or a part of it to its own place."""
    is_output = is_row[:, None] & is_column[None, :]
    at = rows.to(tl.int64)[:, None] * size + columns[None, :]
    if IS_PART:
        tl.store(output + own_part.to(tl.int64) * num_rows * size + at, total, mask=is_output)
    else:
        if HAS_BASE:
            at_base = base + rows.to(tl.int64)[:, None] * base_stride + columns[None, :]
            total += tl.load(at_base, mask=is_output, other=0.0).to(tl.float32)
        tl.store(output + at, total, mask=is_output)


@triton.jit
def multiply_numbers(
    of_rows,  # [BLOCK_M, 1] addresses
    of_columns,  # [1, BLOCK_N] addresses, of numbers `inner_stride` apart
    is_row,
    is_column,
    start,  # first input
    end,  # input after the last one
    inner,
    inner_stride,
    BLOCK_K: tl.constexpr,
):
    """Return the products of rows and columns over a range of inputs, added in their order."""
    total = tl.zeros([of_rows.shape[0], of_columns.shape[1]], tl.float32)
    for block in range(start, end, BLOCK_K):
        places = block + tl.arange(0, BLOCK_K)
        is_place = places < inner
        is_left = is_row[:, None] & is_place[None, :]
        left = tl.load(of_rows + places[None, :], mask=is_left, other=0.0)
        is_right = is_place[:, None] & is_column[None, :]
        right = tl.load(of_columns + places[:, None] * inner_stride, mask=is_right, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=("num_rows",))
def product(
    x,  # [num_rows, inner], rows `x_stride` apart
    weight,  # [size, inner], element (n, k) at n * outer_stride + k * inner_stride
    base,  # [num_rows, size] or, with a stride of 0, [size]; unused unless HAS_BASE
    output,  # [num_rows, size], or float32 [NUM_PARTS, num_rows, size] where IS_PART
    num_rows,
    size,
    inner,
    part_size,  # of the inner dimension, a multiple of BLOCK_K
    x_stride,
    outer_stride,
    inner_stride,
    base_stride,
    NUM_PARTS: tl.constexpr,
    IS_PART: tl.constexpr,
    HAS_BASE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply a tile; grid (row tiles, column tiles, NUM_PARTS where IS_PART, else 1)."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < num_rows, columns < size
    own_part = tl.program_id(2)
    of_rows = x + rows.to(tl.int64)[:, None] * x_stride
    of_columns = weight + columns.to(tl.int64)[None, :] * outer_stride
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for index in range(1 if IS_PART else NUM_PARTS):
        start = (own_part + index) * part_size
        total += multiply_numbers(
            of_rows, of_columns, is_row, is_column, start, tl.minimum(start + part_size, inner),
            inner, inner_stride, BLOCK_K,
        )  # fmt: skip
    store_tile(
        total, base, output, rows, columns, is_row, is_column, own_part, num_rows, size,
        base_stride, IS_PART, HAS_BASE,
    )  # fmt: skip


@triton.jit(do_not_specialize=("num_rows",))
def mapped_product(
    x,  # tensor map of [num_rows, inner], blocks of [BLOCK_M, BLOCK_K]
    weight,  # tensor map of [size, inner], blocks of [BLOCK_N, BLOCK_K]
    base,  # these as in product
    output,
    num_rows,
    size,
    inner,
    part_size,
    base_stride,
    NUM_PARTS: tl.constexpr,
    IS_PART: tl.constexpr,
    HAS_BASE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply a tile whose operands are copied by tensor maps; the sums of `product`.

    Elements outside of a matrix are read as 0. The grid is that of `product`.
    """
    first_row, first_column = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    own_part = tl.program_id(2)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for index in range(1 if IS_PART else NUM_PARTS):
        start = (own_part + index) * part_size
        part = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for block in range(start, tl.minimum(start + part_size, inner), BLOCK_K):
            left = x.load([first_row, block])
            right = weight.load([first_column, block])
            part = tl.dot(left, right.T, part, input_precision="ieee")
        total += part
    rows, columns = first_row + tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
    store_tile(
        total, base, output, rows, columns, rows < num_rows, columns < size, own_part, num_rows,
        size, base_stride, IS_PART, HAS_BASE,
    )  # fmt: skip


@triton.jit(do_not_specialize=("num_rows",))
def add_parts(
    parts,  # float32 [NUM_PARTS, num_rows, size]
    base,  # as in product
    output,  # [num_rows, size]
    num_rows,
    size,
    base_stride,
    NUM_PARTS: tl.constexpr,
    HAS_BASE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the parts in order; grid (num_rows, ceil(size / BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < size
    total = tl.zeros([BLOCK], tl.float32)
    for index in range(NUM_PARTS):
        at = (index * num_rows + row) * size + columns
        total += tl.load(parts + at, mask=is_column, other=0.0)
    if HAS_BASE:
        at_base = base + row * base_stride + columns
        total += tl.load(at_base, mask=is_column, other=0.0).to(tl.float32)
    tl.store(output + row * size + columns, total, mask=is_column)


@triton.jit(do_not_specialize=("num_rows",))
def head_product(
    x,  # [num_rows, heads, inner], at row * x_stride + head * x_head_stride
    weight,  # [heads, inner, size]
    output,  # [num_rows, heads, size], at row * stride + head * head_stride
    num_rows,
    size,
    inner,
    x_stride,
    x_head_stride,
    stride,
    head_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply a tile of a head by its matrix; grid (row tiles, column tiles, heads)."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(2).to(tl.int64)
    is_row, is_column = rows < num_rows, columns < size
    of_rows = x + rows.to(tl.int64)[:, None] * x_stride + head * x_head_stride
    of_columns = weight + head * inner * size + columns[None, :]
    total = multiply_numbers(of_rows, of_columns, is_row, is_column, 0, inner, inner, size, BLOCK_K)
    at = output + rows.to(tl.int64)[:, None] * stride + head * head_stride + columns[None, :]
    tl.store(at, total, mask=is_row[:, None] & is_column[None, :])
