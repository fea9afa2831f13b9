"""Low-rank updates of a linear layer, with another adapter for each row.

Punica (Chen et al. 2023, arXiv 2310.18547) groups the rows of an adapter on the host. Here a
program takes any tile of rows, multiplies it by the matrix of each adapter in it, and keeps the
rows of that adapter: the host plans nothing, and a graph can hold it. Where the rows of an adapter
are adjacent, most tiles have one. The sums of a row follow from the matrix alone.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=("num_rows",))
def shrink(
    x,  # [num_rows, inner], rows `x_stride` apart
    places,  # int32 [num_rows]: 1 + the place of the row's adapter in `downs`; 0 without one
    downs,  # [num_places, num_projections * RANK, inner], zeros where an adapter has less
    hidden,  # float32 [num_parts, num_rows, num_projections * RANK]
    num_rows,
    inner,
    num_ranks,  # num_projections * RANK
    part_size,  # of the inner dimension, a multiple of BLOCK_K
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply rows by A; grid (row tiles, tiles of num_ranks, parts of the inner dimension)."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    ranks = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    own_part = tl.program_id(2)
    own = tl.load(places + rows, mask=rows < num_rows, other=0)
    start = own_part * part_size
    end = tl.minimum(start + part_size, inner)
    of_rows = x + rows.to(tl.int64)[:, None] * x_stride
    total = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    left_over = own
    place = tl.max(left_over, 0)
    while place > 0:
        first = (place - 1).to(tl.int64) * num_ranks * inner
        of_ranks = downs + first + ranks.to(tl.int64)[None, :] * inner
        part = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for block in range(start, end, BLOCK_K):
            at = block + tl.arange(0, BLOCK_K)
            is_place = at < inner
            left = tl.load(
                of_rows + at[None, :], mask=(own == place)[:, None] & is_place[None, :], other=0.0
            )
            right = tl.load(of_ranks + at[:, None], mask=is_place[:, None], other=0.0)
            part = tl.dot(left, right, part, input_precision="ieee")
        total = tl.where((own == place)[:, None], part, total)
        left_over = tl.where(left_over == place, 0, left_over)
        place = tl.max(left_over, 0)
    at_hidden = (own_part.to(tl.int64) * num_rows + rows)[:, None] * num_ranks + ranks[None, :]
    tl.store(hidden + at_hidden, total, mask=(own > 0)[:, None])


@triton.jit(do_not_specialize=("num_rows",))
def expand(
    hidden,  # as in shrink
    places,
    ups,  # [num_places, RANK, size], scaled, zeros where an adapter has less
    tiles,  # int32 [num_tiles, 3]: projection, first column, end of the projection's columns
    output,  # [num_rows, size], rows `y_stride` apart
    num_rows,
    size,
    num_ranks,
    y_stride,
    NUM_PARTS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add the products with B to the output; grid (row tiles, column tiles)."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    own = tl.load(places + rows, mask=rows < num_rows, other=0)
    tile = tiles + tl.program_id(1) * 3
    projection, first_column, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    columns = first_column + tl.arange(0, BLOCK_N)
    is_column = columns < end
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first_rank in range(0, RANK, BLOCK_R):
        ranks = first_rank + tl.arange(0, BLOCK_R)
        h = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for index in range(NUM_PARTS):
            row = (index * num_rows + rows).to(tl.int64)
            at = row[:, None] * num_ranks + projection * RANK + ranks[None, :]
            h += tl.load(hidden + at, mask=(own > 0)[:, None], other=0.0)
        left = h.to(ups.dtype.element_ty)
        left_over = own
        place = tl.max(left_over, 0)
        while place > 0:
            at_up = ((place - 1) * RANK + ranks).to(tl.int64)[:, None] * size + columns[None, :]
            right = tl.load(ups + at_up, mask=is_column[None, :], other=0.0)
            part = tl.dot(left, right, input_precision="ieee")
            total += tl.where((own == place)[:, None], part, 0.0)
            left_over = tl.where(left_over == place, 0, left_over)
            place = tl.max(left_over, 0)
    is_output = (own > 0)[:, None] & is_column[None, :]
    at = rows.to(tl.int64)[:, None] * y_stride + columns[None, :]
    total += tl.load(output + at, mask=is_output, other=0.0).to(tl.float32)
    tl.store(output + at, total, mask=is_output)
