"""Draft trees of a head on a rank of the target.

A head whose logits do not depend on the draft tokens before gives the best tokens of each depth:
the tree grows best first (`specdec.kernels.best_first`), or has the shape of given choices
(Medusa). A head that reads them, without KV, gives the best tokens of each path, of which the tree
grows best first as well (`path_tree`). One with KV runs the most valuable nodes of each level
(EAGLE-2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch

from specdec.models.heads.networks.base import DraftHead, FrontierNodes, HeadState, TreeDraftHead
from specdec.sampling.device.device_children import DeviceChildren
from specdec.sampling.device.device_growth import (
    DepthChildren,
    GrownTrees,
    GrowthShape,
    TreeGrowth,
    WantedTrees,
)
from specdec.types.drafts.draft_tree import BASE, TokenTree
from specdec.types.drafts.static_tree import StaticTree
from specdec.worker.head.path_tree import PathTrees
from specdec.worker.head.sampler import DraftEnd, HeadSampler, PartialDraft

_MAX_ROWS = 1024
"""Rows of logits at a time. The plan of memory counts 2,048, or all nodes if they are fewer."""


class HeadTrees:
    """Drafts the trees of one rank's head; its calls are collective."""

    def __init__(
        self, head: DraftHead, sampler: HeadSampler, choices: Sequence[Sequence[int]] = ()
    ) -> None:
        """choices: shape of all trees, as in `StaticTree.of_choices`; none to fit each tree."""
        self._head = head
        self._sampler = sampler
        self._shape = StaticTree.of_choices(choices) if choices else None

    def draft(self, state: HeadState, drafts: Sequence[PartialDraft]) -> None:
        """Fill `drafts`; state: of their sequences, in order."""
        if self._head.reads_drafts:
            grow = self._grow if self._head.capabilities.runs_nodes else self._grow_paths
            grow(state, drafts)
            return
        levels = self._levels(state, drafts)
        if self._shape is not None:
            _set_shape(self._shape, levels, drafts)
            return
        sizes = torch.tensor([(draft.num_wanted, draft.depth) for draft in drafts])
        levels, wanted = levels.within(*sizes.unbind(1)), sizes[:, 0].to(self._head.device)
        max_nodes = max(draft.num_wanted for draft in drafts)
        _set_trees(self._sampler.best_first(levels, wanted, max_nodes), drafts)

    def _levels(self, state: HeadState, drafts: Sequence[PartialDraft]) -> DepthChildren:
        """Return the children; a tree ends where the logits are not numbers."""
        depth, count = max(draft.depth for draft in drafts), self._num_ranks(drafts)
        token_ids = torch.zeros(len(drafts), depth, count, dtype=torch.int64)
        levels = DepthChildren(token_ids, torch.zeros_like(token_ids, dtype=torch.float64))
        rows = list(range(len(drafts)))
        for index in range(depth):
            ends = [drafts[row].after(token_ids[row, :index, 0].tolist()) for row in rows]
            children = self._sampler.children(self._head.logits(state, index), ends, count)
            for column, found in zip(levels, children, strict=True):
                column[rows, index] = found
            has_child = (children.confidences[:, 0] > 0).tolist()
            going = [
                place
                for place, row in enumerate(rows)
                if has_child[place] and index + 1 < drafts[row].depth
            ]
            if not going:
                break
            if len(going) < len(rows):
                state = self._head.select(state, going)
            rows = [rows[place] for place in going]
            state = self._head.advance(state, token_ids[rows, index, 0].tolist(), index)
        return levels

    def _num_ranks(self, drafts: Sequence[PartialDraft]) -> int:
        if self._shape is not None:
            return max(self._shape.ranks) + 1
        # All other nodes of a tree that has a chain of its depth may be siblings.
        return max(draft.num_wanted - draft.depth for draft in drafts) + 1

    def _grow(self, state: HeadState, drafts: Sequence[PartialDraft]) -> None:
        """Grow trees level by level; state: of their bases, in order."""
        head, growth, index = cast(TreeDraftHead, self._head), _Growth(drafts), 0
        while growth.is_going:
            if index > 0:
                state = head.advance_nodes(state, list(growth.frontier_nodes()))
            logits, ends = head.logits(state, index), list(growth.ends())
            growth.add_level(self._sampler.children(logits, ends, growth.width))
            index += 1
        growth.finish()

    def _grow_paths(self, state: HeadState, drafts: Sequence[PartialDraft]) -> None:
        """Grow trees best first, a level at a time; state: of their bases, in order."""
        trees, index = PathTrees(drafts), 0
        while trees.num_rows:
            children = self._children(state, index, list(trees.ends()), trees.num_ranks)
            trees.add_level(*(column.numpy() for column in children))
            if trees.num_rows:
                rows, token_ids = trees.frontier
                state = self._head.advance(self._head.select(state, rows), token_ids, index)
            index += 1
        trees.finish()

    def _children(
        self, state: HeadState, index: int, ends: Sequence[DraftEnd], count: int
    ) -> DeviceChildren:
        """Return the children of the rows of a state, from the logits of some of them at a time."""
        parts = list[DeviceChildren]()
        for first in range(0, len(ends), _MAX_ROWS):
            own = range(first, min(first + _MAX_ROWS, len(ends)))
            part = state if len(own) == len(ends) else self._head.select(state, own)
            logits = self._head.logits(part, index)
            parts.append(self._sampler.children(logits, ends[first : own.stop], count))
        return DeviceChildren(*map(torch.cat, zip(*parts, strict=True)))


class _Node(NamedTuple):
    """A node of a frontier.

    place: there, with the missing ones. path: tokens up to it. parent_row: of the last state.
    kv_index: among the nodes of its tree that have KV.
    """

    place: int
    path: tuple[int, ...]
    parent_row: int
    kv_index: int


class _Growth:
    """Trees that grow. width: the most nodes that run on a level, and children of each."""

    def __init__(self, drafts: Sequence[PartialDraft]) -> None:
        sizes = [GrowthShape.of(draft.num_wanted, draft.depth) for draft in drafts]
        shape = GrowthShape(*map(max, zip(*sizes, strict=True)))
        wanted = WantedTrees(*torch.tensor(sizes).unbind(1))
        self.width, self._level, self._num_places = shape.width, 0, 1
        self._drafts, self._growth = drafts, TreeGrowth(shape, wanted)
        self._frontiers = [[_Node(0, (), 0, BASE)] for _ in drafts]
        self._run_parents: list[list[int]] = [[] for _ in drafts]

    @property
    def is_going(self) -> bool:
        """Return whether another level follows."""
        return any(self._frontiers)

    def ends(self) -> Iterator[DraftEnd]:
        """Yield the places after the nodes of the frontiers."""
        for draft, frontier in zip(self._drafts, self._frontiers, strict=True):
            for node in frontier:
                yield draft.after(node.path)

    def add_level(self, children: DeviceChildren) -> None:
        """Add the children of the nodes of the frontiers, in order."""
        index = [
            tree * self._num_places + node.place
            for tree, frontier in enumerate(self._frontiers)
            for node in frontier
        ]
        size = (len(self._drafts) * self._num_places, self.width)
        found = DeviceChildren(*(column.new_zeros(size) for column in children))
        for own, given in zip(found, children, strict=True):
            own[index] = given
        columns = (column.tolist() for column in self._growth.add_level(found))
        rows = iter(range(len(index)))
        self._level, self._num_places = self._level + 1, self.width
        self._frontiers = [
            self._next_frontier(tree, rows, *level)
            for tree, level in enumerate(zip(*columns, strict=True))
        ]

    def _next_frontier(
        self,
        tree: int,
        rows: Iterator[int],
        token_ids: Sequence[int],
        parent_places: Sequence[int],
        is_node: Sequence[bool],
    ) -> list[_Node]:
        """Return the next frontier of a tree. rows: of the state, for each node of this one."""
        parents = {node.place: (node, next(rows)) for node in self._frontiers[tree]}
        if self._level == self._drafts[tree].depth:
            return []
        frontier, run_parents = list[_Node](), self._run_parents[tree]
        for place in (place for place, is_present in enumerate(is_node) if is_present):
            parent, row = parents[parent_places[place]]
            path = (*parent.path, token_ids[place])
            frontier.append(_Node(place, path, row, len(run_parents)))
            run_parents.append(parent.kv_index)
        return frontier

    def frontier_nodes(self) -> Iterator[FrontierNodes]:
        """Yield the frontiers, which run next."""
        for frontier, run_parents in zip(self._frontiers, self._run_parents, strict=True):
            if frontier:
                rows = [node.parent_row for node in frontier]
                tokens = [node.path[-1] for node in frontier]
                yield FrontierNodes(rows, tokens, tuple(run_parents))

    def finish(self) -> None:
        """Set the trees of the drafts."""
        _set_trees(self._growth.best(), self._drafts)


def _set_shape(shape: StaticTree, levels: DepthChildren, drafts: Sequence[PartialDraft]) -> None:
    """Set trees of the given shape, as far as its nodes exist and are wanted."""
    num_ranks = (levels.confidences > 0).sum(2).tolist()
    columns = zip(drafts, levels.token_ids.tolist(), num_ranks, strict=True)
    for draft, token_ids, own_ranks in columns:
        own = shape.within(own_ranks, draft.num_wanted)
        draft.set_tree(TokenTree(own.token_ids(token_ids), own.parents))


def _set_trees(trees: GrownTrees, drafts: Sequence[PartialDraft]) -> None:
    columns = (column.tolist() for column in trees)
    for draft, count, token_ids, parents in zip(drafts, *columns, strict=True):
        draft.set_tree(TokenTree(token_ids[:count], parents[:count]))
