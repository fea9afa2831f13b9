"""Verification of drafts, and the moves of KV slots after it, without a host synchronization."""

import triton
import triton.language as tl

_BASE = tl.constexpr(-1)

# Arguments for whose values nothing is compiled again: a step may have any.
_WALK_TREE = ("draft_stride", "parent_stride", "nodes_stride", "kept_stride", "max_nodes")
_PATH_MOVES = ("max_nodes", "table_stride")
_MOVE_SLOTS = ("num_moves",)


@triton.jit(do_not_specialize=_WALK_TREE)
def walk_tree(
    sampled,  # [B, max_nodes + 1] int64, the target's token after the base and after each node
    is_invalid,  # [B, max_nodes + 1] bool, whether it is no token
    draft_ids,  # [B, max_nodes] int64, rows of draft_stride
    parents,  # [B, max_nodes] int64, rows of parent_stride; -1 for children of the base
    num_nodes,  # [B] int64, apart by nodes_stride
    num_kept,  # [B] int64, drafts of a chain to accept whatever they are; negative for a walk
    token_ids,  # output [B, max_nodes + 1] int64, the first num_tokens of each row
    num_tokens,  # output [B] int64
    places,  # output [B, max_nodes + 1] int64, of each new token among the row's sampled ones
    draft_stride,
    parent_stride,
    nodes_stride,
    kept_stride,
    max_nodes,
    BLOCK: tl.constexpr,
):
    """Follow the sampled tokens from the base while each is a child of the one before; grid (B,).

    Of equal siblings the first one is taken, as in `types.drafts.draft_tree.walk`. The walk ends
    before a token that is invalid.
    """
    sequence = tl.program_id(0).to(tl.int64)
    nodes = tl.arange(0, BLOCK)
    is_node = nodes < tl.load(num_nodes + sequence * nodes_stride)
    kept = tl.load(num_kept + sequence * kept_stride)
    drafts = tl.load(draft_ids + sequence * draft_stride + nodes, mask=is_node, other=-1)
    above = tl.load(parents + sequence * parent_stride + nodes, mask=is_node, other=-2)
    row = sequence * (max_nodes + 1)
    found, of_found = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    node = tl.full((), _BASE, tl.int32)
    length = tl.full((), 0, tl.int32)
    while node < BLOCK:
        token = tl.load(sampled + row + node + 1)
        is_token = tl.load(is_invalid + row + node + 1) == 0
        is_child = (above == node) & (drafts == token)
        is_next = tl.where(kept >= 0, (nodes == node + 1) & (nodes < kept), is_child)
        following = tl.min(tl.where(is_next & is_token, nodes, BLOCK), 0)
        accepted = tl.sum(tl.where(nodes == following, drafts, 0), 0)
        token = tl.where(following < BLOCK, accepted, token)
        found = tl.where((nodes == length) & is_token, token, found)
        of_found = tl.where(nodes == length, node + 1, of_found)
        length += is_token.to(tl.int32)
        node = following
    is_place = nodes <= max_nodes
    tl.store(token_ids + row + nodes, found, mask=is_place)
    tl.store(places + row + nodes, of_found, mask=is_place)
    tl.store(num_tokens + sequence, length.to(tl.int64))


@triton.jit(do_not_specialize=_PATH_MOVES)
def path_moves(
    places,  # [B, max_nodes + 1] int64, as from walk_tree
    num_tokens,  # [B] int64
    bases,  # [B] int64, position in the cache of the base of each tree
    block_tables,  # [num_tables, table_stride] int64
    tables,  # [B] int64, the row of block_tables of each sequence
    sources,  # output [B, max_nodes] int32, slots; -1 where nothing moves
    targets,  # output [B, max_nodes] int32
    max_nodes,
    table_stride,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the moves that put the KV of accepted nodes after their base; grid (B,)."""
    sequence = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    is_accepted = index < tl.load(num_tokens + sequence) - 1
    old = tl.load(places + sequence * (max_nodes + 1) + 1 + index, mask=is_accepted, other=0)
    new = index + 1
    is_moved = is_accepted & (old != new)
    base = tl.load(bases + sequence)
    table = block_tables + tl.load(tables + sequence) * table_stride
    old_pages = tl.load(table + (base + old) // PAGE, mask=is_moved, other=0)
    new_pages = tl.load(table + (base + new) // PAGE, mask=is_moved, other=0)
    source = tl.where(is_moved, old_pages * PAGE + (base + old) % PAGE, -1)
    target = new_pages * PAGE + (base + new) % PAGE
    at = sequence * max_nodes + index
    tl.store(sources + at, source, mask=index < max_nodes)
    tl.store(targets + at, target, mask=index < max_nodes)


@triton.jit(do_not_specialize=_MOVE_SLOTS)
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
