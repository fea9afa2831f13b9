"""Masks of torch's attention: the causal context, windows, and trees of drafts."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.types.drafts.draft_tree import MAX_TREE_NODES, Parents, ancestors, depths, signed_words


def context_mask(
    positions: Tensor,
    first_slots: Tensor,
    max_visible: int,
    window: int | None,
    num_ahead: int = 0,
    lowest: Tensor | None = None,
) -> Tensor:
    """Return which slots are masked for queries at `positions` [G, Q], as [G, Q, max_visible].

    A slot is that of the position with the same index, as in sequences that end in a chain.
    first_slots: [G], the first slot with KV. num_ahead: slots after its own that a query sees.
    lowest: [G, Q], the first slot that a query sees; None: any.
    """
    slots = torch.arange(max_visible, device=positions.device)
    is_masked = slots > positions[:, :, None] + num_ahead
    is_masked |= slots < first_slots[:, None, None]
    if window is not None:
        is_masked |= slots <= positions[:, :, None] - window
    if lowest is not None:
        is_masked |= slots < lowest[:, :, None]
    return is_masked


def mask_tree(
    is_masked: Tensor,
    parents: Parents,
    query_len: int,
    window: int | None,
    chunk: int | None = None,
    last_position: int = 0,
) -> None:
    """Mask the nodes of a tree that are not ancestors of a query, in place.

    is_masked: [Q, S] of one sequence, whose last slots are the nodes, and whose last of `query_len`
    queries are the last nodes; further queries repeat the last one. chunk: as in Visible, with the
    position of the last query.
    """
    depth = torch.tensor(depths(parents), device=is_masked.device)
    nodes = torch.arange(len(parents), device=is_masked.device)
    words = torch.tensor(signed_words(ancestors(parents)), device=is_masked.device)
    is_visible = (words[:, None] >> nodes) & 1 == 1  # [nodes as queries, nodes as keys]
    if window is not None:
        is_visible &= depth[:, None] - depth < window
    if chunk is not None:
        chunks = (last_position - depth[-1] + depth) // chunk
        is_visible &= chunks[:, None] == chunks
    first = max(0, query_len - len(parents))
    columns = is_masked[:, is_masked.shape[1] - len(parents) :]
    columns[first:query_len] = ~is_visible[first - query_len :]
    columns[query_len:] = ~is_visible[-1]


def mask_nodes(is_masked: Tensor, words: Tensor, first_nodes: Tensor) -> Tensor:
    """Return a mask [B, Q, S] with the nodes of trees masked that a query does not see.

    is_masked: of the context, as `context_mask` returns it. words: [B, Q] int64, the nodes that
    each query sees as bits. first_nodes: [B] int64, slot of the first node; all further ones are
    those of nodes, or empty.
    """
    slots = torch.arange(is_masked.shape[2], device=is_masked.device)
    nodes = (slots - first_nodes[:, None])[:, None]  # [B, 1, S]
    bits = words[:, :, None] >> nodes.clamp(0, MAX_TREE_NODES - 1) & 1
    is_seen = (bits == 1) & (nodes < MAX_TREE_NODES)
    return torch.where(nodes >= 0, ~is_seen, is_masked)
