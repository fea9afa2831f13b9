"""Verification of draft trees and chains in tensors of fixed shape, without the host.

It is the walk of coupled verification (`types.drafts.draft_tree.walk`), for all sequences at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.sampling.device.device_sampler import DeviceSample


@dataclass(frozen=True)
class DeviceTrees:
    """Trees of drafts of B sequences, padded to N nodes; a chain has the parents -1, 0, 1, ...

    parents: None where all are chains.
    num_kept: of a chain whose drafts are accepted by chance, how many are; else -1.
    """

    token_ids: Tensor  # [B, N] int64
    parents: Tensor | None  # [B, N] int64; -1 for children of the base
    num_nodes: Tensor  # [B] int64
    num_kept: Tensor  # [B] int64


class VerifiedChains(NamedTuple):
    """New tokens of B sequences: of each the first `counts`, from 0 to Q."""

    token_ids: Tensor  # [B, Q] int64
    counts: Tensor  # [B] int64


class VerifiedTrees(NamedTuple):
    """New tokens of B sequences: of each the first `counts`, from 0 to Q = N + 1.

    places: where each was sampled, 0 after the base, 1 + i after node i; None where all are chains.
    """

    token_ids: Tensor  # [B, Q] int64
    counts: Tensor  # [B] int64
    places: Tensor | None  # [B, Q] int64

    @property
    def chains(self) -> VerifiedChains:
        """The new tokens alone."""
        return VerifiedChains(self.token_ids, self.counts)


def verify_trees(sample: DeviceSample, trees: DeviceTrees) -> VerifiedTrees:
    """Follow the sampled tokens from each base while each is a child of the one before.

    Of equal siblings the first one is taken. The new tokens end before the first row that is
    invalid. A node is accepted where the target samples it after its parent, and its parent is
    accepted too; the accepted ones are a path. sample: of B sequences with N + 1 rows each.
    """
    num_sequences, num_nodes = trees.token_ids.shape
    sampled = sample.token_ids.view(num_sequences, -1)
    is_valid = ~sample.is_invalid.view(num_sequences, -1)
    if trees.parents is None:
        return _verify_chains(sampled, is_valid, trees)
    above = trees.parents + 1  # place of each parent
    is_accepted = _taken(sampled, trees, trees.parents) & is_valid.gather(1, above)
    is_accepted = _with_ancestors(is_accepted, above)
    # Accepted nodes are in the order of their path, since a parent stands before its children.
    order = torch.where(is_accepted, is_accepted.cumsum(1), num_nodes + 1)
    nodes = torch.arange(1, num_nodes + 1, device=sampled.device).expand_as(order)
    places = sampled.new_zeros(num_sequences, num_nodes + 2).scatter_(1, order, nodes)[:, :-1]
    num_accepted = is_accepted.sum(1, keepdim=True)
    tokens = F.pad(trees.token_ids.gather(1, (places[:, 1:] - 1).clamp_min(0)), (0, 1))
    last = places.gather(1, num_accepted)
    tokens.scatter_(1, num_accepted, sampled.gather(1, last))
    counts = num_accepted + is_valid.gather(1, last)
    return VerifiedTrees(tokens, counts.squeeze(1), places)


def _verify_chains(sampled: Tensor, is_valid: Tensor, chains: DeviceTrees) -> VerifiedTrees:
    """Verify chains, of which the accepted tokens are the first; by fewer operators."""
    if not chains.token_ids.shape[1]:
        return VerifiedTrees(sampled, is_valid.long().squeeze(1), None)
    nodes = torch.arange(chains.token_ids.shape[1], device=sampled.device)
    num_kept, before = chains.num_kept[:, None], sampled[:, :-1]
    is_equal = (before == chains.token_ids) & (nodes < chains.num_nodes[:, None])
    is_accepted = torch.where(num_kept >= 0, nodes < num_kept, is_equal)
    is_output = F.pad(is_accepted, (1, 0), value=True) & is_valid
    tokens = torch.cat([torch.where(is_accepted, chains.token_ids, before), sampled[:, -1:]], 1)
    return VerifiedTrees(tokens, is_output.long().cumprod(1).sum(1), None)


def _taken(sampled: Tensor, trees: DeviceTrees, parents: Tensor) -> Tensor:
    """Return the nodes that the walk takes from their parents, if it comes there, [B, N] bool."""
    nodes = torch.arange(trees.token_ids.shape[1], device=sampled.device)
    is_node, num_kept = nodes < trees.num_nodes[:, None], trees.num_kept[:, None]
    is_match = (sampled.gather(1, parents + 1) == trees.token_ids) & is_node
    is_sibling = parents[:, :, None] == parents[:, None, :]
    is_earlier = is_sibling & (nodes < nodes[:, None]) & is_match[:, None, :]
    return torch.where(num_kept >= 0, nodes < num_kept, is_match & ~is_earlier.any(2))


def _with_ancestors(is_taken: Tensor, above: Tensor) -> Tensor:
    """Return the nodes that are taken with all of their ancestors, [B, N] bool.

    above: [B, N], 1 + the parent of each node. Each round doubles the length of the paths.
    """
    is_taken, above = F.pad(is_taken, (1, 0), value=True), F.pad(above, (1, 0))
    for _ in range(above.shape[1].bit_length()):
        is_taken = is_taken & is_taken.gather(1, above)
        above = above.gather(1, above)
    return is_taken[:, 1:]
