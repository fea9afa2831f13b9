"""Draft trees of a head on a rank of the target.

A head whose logits do not depend on the draft tokens before gives the best tokens of each depth:
the tree is the one with the most expected accepted tokens, or has the shape of given choices
(Medusa). Any other head runs the most valuable nodes of each level (EAGLE-2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from specdec.models.heads.networks.base import DraftHead, FrontierNodes, HeadState, TreeDraftHead
from specdec.sampling.tree_growth import Children, DynamicTree, fitted_choices
from specdec.types.drafts.draft_tree import BASE, growth_width, is_chain
from specdec.types.drafts.static_tree import StaticTree
from specdec.worker.head.sampler import DraftEnd, HeadSampler, PartialDraft

Levels = list[tuple[list[int], list[float]]]
"""Tokens and confidences of the best children at each depth."""


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
            self._grow(state, [_Growth(draft) for draft in drafts])
            return
        for draft, levels in zip(drafts, self._levels(state, drafts), strict=True):
            shape, num_nodes = self._shape, draft.num_wanted
            if shape is None:
                rates = [confidences for _, confidences in levels]
                shape = StaticTree.of_choices(fitted_choices(rates, num_nodes, with_chain=True))
            shape = shape.within([len(tokens) for tokens, _ in levels], num_nodes)
            _set_tree(draft, shape.token_ids([tokens for tokens, _ in levels]), shape.parents)

    def _levels(self, state: HeadState, drafts: Sequence[PartialDraft]) -> list[Levels]:
        """Return the best children at each depth of each tree."""
        found: list[Levels] = [[] for _ in drafts]
        count = self._num_ranks(drafts)
        rows, index = list(range(len(drafts))), 0
        while rows:
            ends = [drafts[row].after(_best_tokens(found[row])) for row in rows]
            children = self._sampler.children(self._head.logits(state, index), ends, count)
            going = list[int]()
            for place, row in enumerate(rows):
                own = children.of(place)
                if own[0]:
                    found[row].append(own)
                    if len(found[row]) < drafts[row].depth:
                        going.append(place)
            if 0 < len(going) < len(rows):
                state = self._head.select(state, going)
            rows = [rows[place] for place in going]
            if rows:
                tokens = [_best_tokens(found[row])[-1] for row in rows]
                state = self._head.advance(state, tokens, index)
            index += 1
        return found

    def _num_ranks(self, drafts: Sequence[PartialDraft]) -> int:
        if self._shape is not None:
            return max(self._shape.ranks) + 1
        # All other nodes of a tree that has a chain of its depth may be siblings.
        return max(draft.num_wanted - draft.depth for draft in drafts) + 1

    def _grow(self, state: HeadState, growths: Sequence[_Growth]) -> None:
        """Grow trees level by level; state: of their bases, in order."""
        all_growths, index = growths, 0
        while growths:
            ends = [end for growth in growths for end in growth.ends()]
            count = max(growth.width for growth in growths)
            children = self._sampler.children(self._head.logits(state, index), ends, count)
            first = 0
            for growth in growths:
                num_rows = len(growth.tree.frontier)
                growth.add_level(children.take(range(first, first + num_rows)), first)
                first += num_rows
            growths = [growth for growth in growths if growth.is_going]
            if growths:
                state = self._advance(state, growths, index)
            index += 1
        for growth in all_growths:
            _set_tree(growth.draft, *growth.tree.best(growth.draft.num_wanted))

    def _advance(self, state: HeadState, growths: Sequence[_Growth], index: int) -> HeadState:
        """Run the frontier of each tree; return one row for each of its nodes."""
        if self._head.capabilities.runs_nodes:
            nodes = [growth.frontier_nodes() for growth in growths]
            return cast(TreeDraftHead, self._head).advance_nodes(state, nodes)
        rows = [row for growth in growths for row in growth.parent_rows]
        tokens = [token for growth in growths for token in growth.frontier_tokens]
        return self._head.advance(self._head.select(state, rows), tokens, index)


class _Growth:
    """A tree that grows.

    width: nodes that run on each level, and children of each. parent_rows: of the last state, for
    each node of the frontier.
    """

    def __init__(self, draft: PartialDraft) -> None:
        self.draft = draft
        self.width = growth_width(draft.num_wanted, draft.depth)
        self.tree = DynamicTree()
        self.parent_rows: list[int] = []
        self._num_levels = 0
        self._run_nodes = {BASE: BASE}  # index among the nodes that have KV
        self._run_parents: list[int] = []

    @property
    def is_going(self) -> bool:
        """Return whether another level follows."""
        return bool(self.tree.frontier) and self._num_levels < self.draft.depth

    @property
    def frontier_tokens(self) -> list[int]:
        """The tokens of the frontier."""
        return [self.tree.token_of(node) for node in self.tree.frontier]

    def ends(self) -> Iterator[DraftEnd]:
        """Yield the places after the nodes of the frontier."""
        for node in self.tree.frontier:
            yield self.draft.after(self.tree.path_of(node))

    def add_level(self, children: Children, first_row: int) -> None:
        """Add the children of the frontier, whose rows of the state begin at `first_row`."""
        rows = {node: first_row + place for place, node in enumerate(self.tree.frontier)}
        frontier = self.tree.grow(children, self.width)
        self.parent_rows = [rows[self.tree.parent_of(node)] for node in frontier]
        self._num_levels += 1

    def frontier_nodes(self) -> FrontierNodes:
        """Return the frontier, which runs next."""
        for node in self.tree.frontier:
            self._run_parents.append(self._run_nodes[self.tree.parent_of(node)])
            self._run_nodes[node] = len(self._run_nodes) - 1
        return FrontierNodes(self.parent_rows, self.frontier_tokens, tuple(self._run_parents))


def _best_tokens(levels: Levels) -> list[int]:
    """Return the best token of each depth."""
    return [tokens[0] for tokens, _ in levels]


def _set_tree(draft: PartialDraft, token_ids: Sequence[int], parents: Sequence[int]) -> None:
    draft.token_ids = list(token_ids)
    draft.parents = None if is_chain(parents) else tuple(parents)
