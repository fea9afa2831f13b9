"""Verification of drafts on a GPU, in fixed shapes."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from specdec.kernels.triton.device import verify as kernels


class WalkedTrees(NamedTuple):
    """New tokens of B sequences, and where each was sampled.

    places: of the new tokens among the Q sampled ones of a sequence, 0 for that after the base,
    and 1 + i for that after node i.
    """

    token_ids: Tensor  # [B, Q] int64; the first num_tokens of each row are valid, as in places
    num_tokens: Tensor  # [B] int64
    places: Tensor  # [B, Q] int64


def walk_trees(
    sampled: Tensor,
    is_invalid: Tensor,
    draft_ids: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    num_kept: Tensor,
) -> WalkedTrees:
    """Follow the sampled tokens through trees and chains, as `device_trees.verify_trees`.

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
        num_nodes.contiguous(),
        num_kept.contiguous(),
        token_ids,
        num_tokens,
        places,
        draft_ids.stride(0),
        parents.stride(0),
        max_nodes,
        BLOCK=max(2, triton.next_power_of_2(max_nodes + 1)),
        num_warps=1,
    )
    return WalkedTrees(token_ids, num_tokens, places)
