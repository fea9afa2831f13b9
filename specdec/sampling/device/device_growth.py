"""Growth of draft trees by value, in tensors of fixed shape, for several sequences at once.

EAGLE-2 (Li et al. 2024, arXiv 2406.16858, sections 4.1 and 4.2): the *value* of a node is the
product of confidences along its path, an estimate of the probability that it is accepted. A tree
grows level by level at its most valuable nodes, and keeps the best of all. The chain of best
children is always kept, so that the tree accepts at least what this chain does.

Nothing is read by the host. Nodes of a level that a tree lacks have the value 0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.sampling.device.device_children import DeviceChildren
from specdec.types.drafts.draft_tree import BASE, MAX_TREE_NODES, growth_width

_ABOVE_ALL_VALUES = 2.0
"""In place of the value of a node of the chain, which is always kept; values are at most 1."""

_LEAST_VALUE = math.ulp(0.0)
"""Value of a node whose product of confidences is too small for a float64."""


class GrowthShape(NamedTuple):
    """The largest trees: `num_nodes` of them are kept, at most `depth` of which follow each other.

    `depth` is also the longest chain. width: most nodes that run on a level, and children of each.
    """

    num_nodes: int
    depth: int
    width: int

    @classmethod
    def of(cls, num_nodes: int, depth: int) -> GrowthShape:
        """Return the shape of trees of one size."""
        return cls(num_nodes, depth, growth_width(num_nodes, depth))

    def first_node(self, level: int) -> int:
        """Return the index of the first node of a level among all that the trees may have."""
        return 0 if level == 0 else self.width + (level - 1) * self.width**2

    def holds(self, num_nodes: int, depth: int) -> bool:
        """Return whether a tree of this size can grow; depth: 0 for a chain."""
        depth = min(depth or num_nodes, num_nodes)
        if depth > self.depth or num_nodes > self.num_nodes:
            return False
        return depth == 0 or growth_width(num_nodes, depth) <= self.width

    @property
    def num_ranks(self) -> int:
        """Most children of a node of a tree that has a chain of the whole depth."""
        return self.num_nodes - self.depth + 1

    def holds_best_first(self, num_nodes: int, depth: int) -> bool:
        """Return whether a best-first tree of this size can grow; depth: 0 for a chain."""
        depth = min(depth or num_nodes, num_nodes)
        if depth > self.depth or num_nodes > self.num_nodes:
            return False
        return num_nodes - depth < self.num_ranks


class WantedTrees(NamedTuple):
    """Sizes of the trees of B sequences, [B] int64 each; depth 0 for no draft.

    widths: nodes that run on a level, and children of each; 1 for a chain.
    """

    num_nodes: Tensor
    depths: Tensor
    widths: Tensor

    @property
    def is_tree(self) -> Tensor:
        """The sequences whose drafts may be no chains, [B] bool."""
        return self.num_nodes > self.depths


class Frontier(NamedTuple):
    """Nodes whose children come next, of B sequences; the most valuable first.

    parent_places: their parents' places in the frontier before.
    """

    token_ids: Tensor  # [B, W] int64
    parent_places: Tensor  # [B, W] int64
    is_node: Tensor  # [B, W] bool


class DepthChildren(NamedTuple):
    """The best children at each depth of B trees, whatever the tokens before are; best first.

    confidences: as in `DeviceChildren`.
    """

    token_ids: Tensor  # [B, depth, num_ranks] int64
    confidences: Tensor  # [B, depth, num_ranks] float64

    def within(self, num_nodes: Tensor, depths: Tensor) -> DepthChildren:
        """Return the children that trees of these sizes may have beside a chain of their depth.

        The trees then do not depend on each other, and one of as many nodes as its depth is a
        chain. num_nodes, depths: [B] int64.
        """
        _, levels, ranks = (torch.arange(n, device=depths.device) for n in self.token_ids.shape)
        is_beyond = levels[:, None] >= depths[:, None, None]
        is_beyond = is_beyond | (ranks > (num_nodes - depths)[:, None, None])
        return self._replace(confidences=self.confidences.masked_fill(is_beyond, 0))


class GrownTrees(NamedTuple):
    """Trees of B sequences; of each the first `counts` nodes, siblings best first."""

    counts: Tensor  # [B] int64
    token_ids: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int64, as in `specdec.types.drafts.draft_tree`


class GrownChains(NamedTuple):
    """The first paths of trees of B sequences: of each the first `counts` tokens."""

    counts: Tensor  # [B] int64
    token_ids: Tensor  # [B, D] int64


class _Level(NamedTuple):
    """Nodes of a level, M = parents * W; parents: among all nodes. chain: index of its node."""

    token_ids: Tensor  # [B, M] int64
    values: Tensor  # [B, M] float64
    parents: Tensor  # [B, M] int64
    chain: Tensor  # [B, 1] int64
    has_chain: Tensor  # [B, 1] bool


def growth_widths(num_nodes: Tensor, depths: Tensor) -> Tensor:
    """Return `growth_width` of trees, [B] int64; 1 where there is none."""
    per_level = (num_nodes + depths - 1) // depths.clamp_min(1)
    with_kv = MAX_TREE_NODES // (depths - 1).clamp_min(1)
    return torch.minimum(per_level, with_kv).clamp_min(1)


class TreeGrowth:
    """Trees that grow level by level: `add_level` for each, then `best`."""

    def __init__(self, shape: GrowthShape, wanted: WantedTrees) -> None:
        num_rows, device = len(wanted.depths), wanted.depths.device
        self._shape, self._wanted = shape, wanted
        self._levels: list[_Level] = []
        # Of the frontier: values, nodes among all, and the place of the chain's node, if there is.
        self._values = torch.ones(num_rows, 1, dtype=torch.float64, device=device)
        self._nodes = torch.full((num_rows, 1), BASE, device=device)
        self._chain_places = torch.zeros_like(self._nodes)
        self._has_chain = self._nodes == BASE
        self._ranks = torch.arange(shape.width, device=device)

    def add_level(self, children: DeviceChildren) -> Frontier:
        """Add the children of the frontier, W of each node; return the new frontier.

        children: of the base first, then of W nodes of each sequence.
        """
        width, index = self._shape.width, len(self._levels)
        num_rows, num_parents = self._values.shape
        widths, depths = self._wanted.widths[:, None], self._wanted.depths[:, None]
        is_child = ((self._ranks < widths) & (index < depths))[:, None]
        confidences = children.confidences.view(num_rows, num_parents, width)
        above = self._values[:, :, None]
        is_child = is_child & (confidences > 0) & (above > 0)
        values = (above * confidences).clamp_min(_LEAST_VALUE).masked_fill(~is_child, 0).flatten(1)
        token_ids = children.token_ids.view(num_rows, -1)
        chain = self._chain_places * width
        has_chain = self._has_chain & (values.gather(1, chain) > 0)
        parents = self._nodes.repeat_interleave(width, 1)
        first = self._shape.first_node(index)
        self._levels.append(_Level(token_ids, values, parents, first + chain, has_chain))
        kept = self._most_valuable(values, chain, has_chain)
        self._values = values.gather(1, kept).masked_fill(self._ranks >= widths, 0)
        self._nodes, self._has_chain = first + kept, has_chain
        return Frontier(token_ids.gather(1, kept), kept // width, self._values > 0)

    def _most_valuable(self, values: Tensor, chain: Tensor, has_chain: Tensor) -> Tensor:
        """Return the indices [B, W] of the next frontier; the chain replaces the last other one."""
        order = values.sort(dim=1, descending=True, stable=True).indices
        last = self._wanted.widths[:, None] - 1
        place = (order == chain).long().argmax(1, keepdim=True)
        is_replaced = has_chain & (place > last) & (self._ranks == last)
        self._chain_places = torch.minimum(place, last)
        return torch.where(is_replaced, chain, order[:, : self._shape.width])

    def best(self) -> GrownTrees:
        """Return the most valuable nodes of each tree, with the whole chain."""
        values = torch.cat([level.values for level in self._levels], 1)
        num_all, device = values.shape[1], values.device
        chains = torch.cat([level.chain for level in self._levels], 1)
        has_chain = torch.cat([level.has_chain for level in self._levels], 1)
        own = values.gather(1, chains).masked_fill(has_chain, _ABOVE_ALL_VALUES)
        values.scatter_(1, chains, own)
        ordered = values.sort(dim=1, descending=True, stable=True)
        places = torch.arange(min(self._shape.num_nodes, num_all), device=device)
        is_kept = (places < self._wanted.num_nodes[:, None]) & (
            ordered.values[:, : len(places)] > 0
        )
        nodes = torch.where(is_kept, ordered.indices[:, : len(places)], num_all).sort(1).values
        return self._trees(nodes, is_kept.sum(1), num_all)

    def _trees(self, nodes: Tensor, counts: Tensor, num_all: int) -> GrownTrees:
        """Return the trees of nodes [B, n], ascending; after the `counts` first is padding."""
        parents = torch.cat([level.parents for level in self._levels], 1)
        token_ids = torch.cat([level.token_ids for level in self._levels], 1)
        places = torch.arange(nodes.shape[1], device=nodes.device).expand_as(nodes)
        place_of = nodes.new_zeros(len(nodes), num_all + 1).scatter_(1, nodes, places)
        is_node, own = nodes < num_all, nodes.clamp_max(num_all - 1)
        above = parents.gather(1, own)
        found = place_of.gather(1, above.clamp_min(0)).masked_fill(above == BASE, BASE)
        missing = (0, self._shape.num_nodes - nodes.shape[1])
        return GrownTrees(
            counts,
            F.pad(token_ids.gather(1, own).masked_fill(~is_node, 0), missing),
            F.pad(found.masked_fill(~is_node, BASE), missing, value=BASE),
        )

    def chains(self) -> GrownChains:
        """Return the chains of best children."""
        tokens = [
            level.token_ids.gather(1, level.chain - self._shape.first_node(index))
            for index, level in enumerate(self._levels)
        ]
        counts = torch.cat([level.has_chain for level in self._levels], 1).sum(1)
        return GrownChains(counts, torch.cat(tokens, 1))
