"""Verification of drafts, and the moves of KV slots behind it, without a host synchronization."""

import triton
import triton.language as tl

_BASE = tl.constexpr(-1)


@triton.jit
def walk_tree(
    sampled,  # [R] int64, the target's token behind the base and behind each node
    draft_ids,  # [B, max_nodes] int32
    parents,  # [B, max_nodes] int32; -1 for children of the base
    num_nodes,  # [B] int32
    row_starts,  # [B] int32, the row of each sequence's base
    token_ids,  # output [B, max_nodes + 1] int32, the first num_tokens of each row
    num_tokens,  # output [B] int32
    path,  # output [B, max_nodes] int32, the accepted nodes, num_tokens - 1 of each row
    max_nodes,
    BLOCK: tl.constexpr,
):
    """Follow the sampled tokens from the base while each is a child of the one before; grid (B,).

    Of equal siblings the first one is taken, as in `specdec.types.draft_tree.walk`.
    """
    sequence = tl.program_id(0)
    nodes = tl.arange(0, BLOCK)
    count = tl.load(num_nodes + sequence)
    at = sequence * max_nodes + nodes
    tokens = tl.load(draft_ids + at, mask=nodes < count, other=-1)
    above = tl.load(parents + at, mask=nodes < count, other=-2)
    start = tl.load(row_starts + sequence)
    node = tl.full((), _BASE, tl.int32)
    length = tl.full((), 0, tl.int32)
    while node < BLOCK:
        token = tl.load(sampled + start + node + 1).to(tl.int32)
        tl.store(token_ids + sequence * (max_nodes + 1) + length, token)
        is_next = (above == node) & (tokens == token)
        node = tl.min(tl.where(is_next, nodes, BLOCK), 0)
        if node < BLOCK:
            tl.store(path + sequence * max_nodes + length, node)
        length += 1
    tl.store(num_tokens + sequence, length)


@triton.jit
def path_moves(
    path,  # [B, max_nodes] int32
    num_tokens,  # [B] int32
    first_nodes,  # [B] int32, position in the cache of the first node of each tree
    block_tables,  # [B, table_stride] int32
    sources,  # output [B, max_nodes] int32, slots; -1 where nothing moves
    targets,  # output [B, max_nodes] int32
    max_nodes,
    table_stride,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the moves that put the KV of accepted nodes behind their base; grid (B,)."""
    sequence = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    at = sequence * max_nodes + places
    is_accepted = places < tl.load(num_tokens + sequence) - 1
    nodes = tl.load(path + at, mask=is_accepted, other=0)
    first = tl.load(first_nodes + sequence)
    table = block_tables + sequence * table_stride
    old, new = first + nodes, first + places
    is_moved = is_accepted & (old != new)
    old_pages = tl.load(table + old // PAGE, mask=is_moved, other=0)
    new_pages = tl.load(table + new // PAGE, mask=is_moved, other=0)
    source = tl.where(is_moved, old_pages * PAGE + old % PAGE, -1)
    tl.store(sources + at, source, mask=places < max_nodes)
    tl.store(targets + at, new_pages * PAGE + new % PAGE, mask=places < max_nodes)


@triton.jit
def move_slots(
    kv_cache,  # [layers, num_slots, SIZE]
    sources,  # [B, num_moves] int32; -1 where nothing moves
    targets,  # [B, num_moves] int32
    layer_stride,
    num_moves,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy slots in order, BLOCK values of each; grid (layers, B, ceil(SIZE / BLOCK)).

    One program makes all moves of a sequence for its values: a later move may overwrite the source
    of an earlier one.
    """
    layer = kv_cache + tl.program_id(0).to(tl.int64) * layer_stride
    row = tl.program_id(1).to(tl.int64) * num_moves
    values = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_moved = values < SIZE
    for move in range(0, num_moves):
        source = tl.load(sources + row + move).to(tl.int64)
        target = tl.load(targets + row + move).to(tl.int64)
        if source >= 0:
            moved = tl.load(layer + source * SIZE + values, mask=is_moved)
            tl.store(layer + target * SIZE + values, moved, mask=is_moved)
