"""Copies of KV between slots of a paged cache, by torch or Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.backend import KernelBackend
from specdec.kernels.reference.forward_batch import SlotMove
from specdec.kernels.reference.kv_scales import as_bytes


def move_kv(kv_cache: Tensor, moves: Sequence[SlotMove], backend: KernelBackend) -> None:
    """Copy the KV of tokens, in all layers; no move overwrites the source of a later one.

    kv_cache: [num_layers, num_slots, 2, num_kv_heads, head_dim], changed in place.
    """
    kv_cache = as_bytes(kv_cache)
    if backend.is_triton:
        from specdec.kernels.triton.moves import move_slots as move_by_kernel  # imports Triton

        pairs = torch.tensor(moves, dtype=torch.int32).t().contiguous().to(kv_cache.device)
        move_by_kernel(kv_cache, pairs[:1], pairs[1:])
        return
    sources, targets = torch.tensor(moves, device=kv_cache.device).unbind(1)
    kv_cache.index_copy_(1, targets, kv_cache[:, sources])


class AcceptedPaths(NamedTuple):
    """The accepted nodes of trees of B sequences, whose KV has to stand after their bases.

    A row of `places` has 0 for the base, and 1 + i for each accepted node i in order; one fewer
    than the number of new tokens are accepted.
    """

    places: Tensor  # [B, Q] int64
    num_tokens: Tensor  # [B] int64, new tokens
    bases: Tensor  # [B] int64, position of each base
    block_tables: Tensor  # [P, M] int64
    tables: Tensor  # [B] int64, the row of block_tables of each sequence
    block_size: int


class PathMoves(NamedTuple):
    """Moves of slots on the device, [B, Q - 1] integers each; a negative source is no move."""

    sources: Tensor
    targets: Tensor


def path_moves(paths: AcceptedPaths) -> PathMoves:
    """Return the moves after accepted paths, without a value that the host has to read."""
    new = torch.arange(1, paths.places.shape[1], device=paths.places.device)
    old, size = paths.places[:, 1:], paths.block_size
    is_moved = (new < paths.num_tokens[:, None]) & (old != new)

    def slots(nodes: Tensor) -> Tensor:
        at = torch.where(is_moved, paths.bases[:, None] + nodes, 0)
        return paths.block_tables[paths.tables[:, None], at // size] * size + at % size

    return PathMoves(slots(old).masked_fill(~is_moved, -1), slots(new))


def move_slots(slots: Tensor, moves: PathMoves) -> None:
    """Copy slots [num_layers, num_slots, ...] in place; no move overwrites a source of a later one.

    The last slot is of padding: what is no move copies it to itself.
    """
    slots = as_bytes(slots)
    padding = slots.shape[1] - 1
    is_moved = moves.sources >= 0
    sources = torch.where(is_moved, moves.sources, padding).flatten()
    targets = torch.where(is_moved, moves.targets, padding).flatten()
    for layer in slots:  # a copy of all layers' slots would be large
        layer.index_copy_(0, targets, layer[sources])
