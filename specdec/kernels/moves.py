"""Copies of KV between slots of a paged cache, by torch or Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.kernels.backend import KernelBackend
from specdec.kernels.forward_batch import SlotMove
from specdec.kernels.kv_scales import as_bytes


def move_kv(kv_cache: Tensor, moves: Sequence[SlotMove], backend: KernelBackend) -> None:
    """Copy the KV of tokens, in all layers; no move overwrites the source of a later one.

    kv_cache: [num_layers, num_slots, 2, num_kv_heads, head_dim], changed in place.
    """
    kv_cache = as_bytes(kv_cache)
    if backend.is_triton:
        from specdec.kernels.triton import moves as triton_moves  # imports Triton

        triton_moves.move_kv(kv_cache, moves)
        return
    sources, targets = torch.tensor(moves, device=kv_cache.device).unbind(1)
    kv_cache.index_copy_(1, targets, kv_cache[:, sources])
