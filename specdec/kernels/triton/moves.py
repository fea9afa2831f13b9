"""Moves of KV between slots on a GPU, from a list of the host or from verified paths."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from specdec.kernels.forward_batch import SlotMove
from specdec.kernels.triton.device import verify as kernels
from specdec.kernels.triton.verify import VerifiedPaths

_BLOCK = 1024


def move_kv(kv_cache: Tensor, moves: Sequence[SlotMove]) -> None:
    """Copy the KV of tokens in all layers; no move overwrites the source of a later one.

    kv_cache: [layers, num_slots, ...].
    """
    pairs = torch.tensor(moves, dtype=torch.int32).t().contiguous().to(kv_cache.device)
    _move_slots(kv_cache, pairs[:1], pairs[1:])


def compact_paths(
    kv_cache: Tensor,
    verified: VerifiedPaths,
    first_nodes: Tensor,  # [B] int32
    block_tables: Tensor,  # [B, M] int32
    block_size: int,
) -> None:
    """Move the KV of accepted nodes to consecutive slots behind their base, on the device.

    kv_cache: [layers, num_slots, ...]. first_nodes: position in the cache of the first node of each
    tree. A chain moves nothing.
    """
    num_seqs, max_nodes = verified.path.shape
    sources = torch.empty_like(verified.path)
    targets = torch.empty_like(verified.path)
    kernels.path_moves[(num_seqs,)](
        verified.path,
        verified.num_tokens,
        first_nodes,
        block_tables,
        sources,
        targets,
        max_nodes,
        block_tables.shape[1],
        PAGE=block_size,
        BLOCK=triton.next_power_of_2(max_nodes),
        num_warps=1,
    )
    _move_slots(kv_cache, sources, targets)


def _move_slots(kv_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy slots; sources, targets: [B, N] int32, a negative source for no move."""
    assert kv_cache.is_contiguous()
    size = kv_cache[0, 0].numel()
    grid = (len(kv_cache), len(sources), triton.cdiv(size, _BLOCK))
    kernels.move_slots[grid](
        kv_cache,
        sources,
        targets,
        kv_cache.stride(0),
        sources.shape[1],
        SIZE=size,
        BLOCK=_BLOCK,
        num_warps=4,
    )
