"""Verification of drafts on a GPU, in fixed shapes."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from specdec.kernels.triton.device import verify as kernels


def walk_trees(
    sampled: Tensor,
    is_invalid: Tensor,
    draft_ids: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    num_kept: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the columns of `VerifiedTrees`, in one launch; see `device_trees.verify_trees`.

    sampled: [B * Q] int64, the target's token after each base and each node, and is_invalid which
    of them are none. draft_ids, parents: [B, Q - 1] int64. num_nodes, num_kept: [B] int64.
    """
    num_sequences, max_nodes = draft_ids.shape
    assert draft_ids.stride(1) == parents.stride(1) == 1
    token_ids = sampled.new_empty(num_sequences, max_nodes + 1)
    num_tokens, places = sampled.new_empty(num_sequences), torch.empty_like(token_ids)
    kernels.walk_tree[(num_sequences,)](
        sampled.contiguous(),
        is_invalid.contiguous(),
        draft_ids,
        parents,
        num_nodes,
        num_kept,
        token_ids,
        num_tokens,
        places,
        draft_ids.stride(0),
        parents.stride(0),
        num_nodes.stride(0),
        num_kept.stride(0),
        max_nodes,
        BLOCK=max(2, triton.next_power_of_2(max_nodes + 1)),
        num_warps=1,
    )
    return token_ids, num_tokens, places
