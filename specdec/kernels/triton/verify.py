"""Verification of drafts on a GPU, in fixed shapes."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from specdec.kernels.triton.device import verify as kernels


class DeviceDrafts(NamedTuple):
    """Drafts of B sequences, each a tree of at most N nodes; a chain has parents -1, 0, 1, ..."""

    token_ids: Tensor  # [B, N] int32
    parents: Tensor  # [B, N] int32; -1 for children of the base
    num_nodes: Tensor  # [B] int32
    row_starts: Tensor  # [B] int32: row of logits of each base; its nodes follow in order


class VerifiedPaths(NamedTuple):
    """The new tokens of B sequences, and the accepted nodes that they follow."""

    token_ids: Tensor  # [B, N + 1] int32; the first num_tokens of each row are valid
    num_tokens: Tensor  # [B] int32, from 1 up
    path: Tensor  # [B, N] int32; the first num_tokens - 1 of each row are valid


def verify_drafts(sampled: Tensor, drafts: DeviceDrafts) -> VerifiedPaths:
    """Follow the sampled tokens through the drafts, as `specdec.types.draft_tree.walk`.

    sampled: [R] int64, the target's token for each row of logits.
    """
    num_seqs, max_nodes = drafts.token_ids.shape
    token_ids = torch.zeros(num_seqs, max_nodes + 1, dtype=torch.int32, device=sampled.device)
    path = torch.zeros(num_seqs, max_nodes, dtype=torch.int32, device=sampled.device)
    num_tokens = torch.empty(num_seqs, dtype=torch.int32, device=sampled.device)
    kernels.walk_tree[(num_seqs,)](
        sampled,
        drafts.token_ids,
        drafts.parents,
        drafts.num_nodes,
        drafts.row_starts,
        token_ids,
        num_tokens,
        path,
        max_nodes,
        BLOCK=max(2, triton.next_power_of_2(max_nodes)),
        num_warps=1,
    )
    return VerifiedPaths(token_ids, num_tokens, path)
