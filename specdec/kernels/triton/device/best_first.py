"""Draft trees that grow best first from the best tokens of each depth."""

import triton
import triton.language as tl

_NONE = tl.constexpr(float("-inf"))
_NO_PLACE = tl.constexpr(2**31 - 1)

# Arguments for whose values nothing is compiled again: a step may have any.
_SIZES = ("depth", "num_children", "max_nodes")


@triton.jit(do_not_specialize=_SIZES)
def best_first(
    log_survival,  # [B, depth, num_children] float64; -inf for no token
    num_nodes,  # [B] int64
    counts,  # output [B] int64
    parents,  # output [B, max_nodes] int64, like the next two; -1 after the nodes
    depths,  # 0 after the nodes
    ranks,  # 0 after the nodes
    depth,
    num_children,
    max_nodes,
    BLOCK: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """Write the nodes of each row in order; grid (B,).

    A place, 0 of the base and 1 + i of node i, offers its next child: that with the largest
    survival is the next node.
    """
    row = tl.program_id(0).to(tl.int64)
    table, out = log_survival + row * depth * num_children, row * max_nodes
    count = tl.load(num_nodes + row)
    all_levels = tl.arange(0, BLOCK_DEPTH)
    firsts = table + all_levels * num_children
    best = tl.load(firsts, mask=all_levels < depth, other=_NONE)
    chain_len = tl.min(tl.where(best == _NONE, all_levels, depth), 0)
    places = tl.arange(0, BLOCK)
    survival = tl.where(places == 0, 0.0, tl.full([BLOCK], _NONE, tl.float64))
    levels, next_ranks = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    offers = survival + tl.load(table)
    num_found = tl.full((), 0, tl.int64)
    for index in range(0, max_nodes):
        is_best = offers == tl.max(offers, 0)
        chosen = tl.min(tl.where(is_best, levels * BLOCK + places, _NO_PLACE), 0) % BLOCK
        parent = tl.where(index < chain_len, index, chosen)
        is_parent = places == parent
        value = tl.sum(tl.where(is_parent, offers, 0.0), 0)
        above = tl.sum(tl.where(is_parent, survival, 0.0), 0)
        level = tl.sum(tl.where(is_parent, levels, 0), 0)
        rank = tl.sum(tl.where(is_parent, next_ranks, 0), 0)
        exists = (value > _NONE) & (index < count)
        num_found += exists.to(tl.int64)
        tl.store(parents + out + index, tl.where(exists, parent - 1, -1))
        tl.store(depths + out + index, tl.where(exists, level + 1, 0))
        tl.store(ranks + out + index, tl.where(exists, rank, 0))
        own = table + level * num_children
        sibling = tl.load(own + rank + 1, mask=exists & (rank + 1 < num_children), other=_NONE)
        child = tl.load(own + num_children, mask=exists & (level + 1 < depth), other=_NONE)
        is_new, is_parent = places == index + 1, places == tl.where(exists, parent, -1)
        offers = tl.where(is_parent, above + sibling, tl.where(is_new, value + child, offers))
        survival = tl.where(is_new, value, survival)
        levels = tl.where(is_new, level + 1, levels)
        next_ranks = tl.where(is_parent, rank + 1, next_ranks)
    tl.store(counts + row, num_found)
