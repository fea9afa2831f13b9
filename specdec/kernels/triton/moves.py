"""Moves of KV between slots on a GPU, from a list of the host or after verified trees."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from specdec.kernels.triton.device import verify as kernels

_BLOCK = 1024


def path_moves(
    places: Tensor,
    num_tokens: Tensor,
    bases: Tensor,
    block_tables: Tensor,
    tables: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """Return the moves after accepted paths, sources and targets [B, Q - 1] int32.

    A source of -1 is no move. For the arguments see `kernels.moves.AcceptedPaths`.
    """
    num_sequences, query_len = places.shape
    assert block_tables.stride(1) == 1
    sources, targets = (
        torch.empty(num_sequences, query_len - 1, dtype=torch.int32, device=places.device)
        for _ in range(2)
    )
    kernels.path_moves[(num_sequences,)](
        places.contiguous(),
        num_tokens.contiguous(),
        bases.contiguous(),
        block_tables,
        tables.contiguous(),
        sources,
        targets,
        query_len - 1,
        block_tables.stride(0),
        PAGE=block_size,
        BLOCK=max(2, triton.next_power_of_2(query_len - 1)),
        num_warps=1,
    )
    return sources, targets


def move_slots(kv_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy slots in all layers, those of a row in order; a negative source is no move.

    kv_cache: [layers, num_slots, ...], changed in place. sources, targets: [B, N] int32.
    """
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
