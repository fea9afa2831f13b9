"""Static draft trees: shapes that do not depend on the text (Medusa's choices)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from specdec.types.drafts.draft_tree import BASE, MAX_TREE_NODES, depths, subtree
from specdec.types.errors import InvalidValueError

Choice = tuple[int, ...]
"""A node by the ranks among siblings on its path, 0 for the best: () is the base."""


@dataclass(frozen=True)
class StaticTree:
    """A tree whose shape does not depend on the text.

    parents: as in `types.drafts.draft_tree`. ranks: of each node among its possible siblings.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    @classmethod
    def of_choices(cls, choices: Sequence[Sequence[int]], name: str = "tree_choices") -> StaticTree:
        """Return the tree of Medusa's choices, such as [[0], [1], [0, 0]], in any order.

        Raises InvalidValueError for a repeated choice, one without its parent, and more than
        MAX_TREE_NODES.
        """
        ordered = sorted(map(tuple, choices), key=lambda choice: (len(choice), choice))
        places: dict[Choice, int] = {(): BASE}
        for place, choice in enumerate(ordered):
            if choice in places or choice[:-1] not in places or min(choice) < 0:
                limit = "a path of ranks from 0 up, listed once, and so are all its beginnings"
                raise InvalidValueError(name, list(choice), limit)
            places[choice] = place
        if len(ordered) > MAX_TREE_NODES:
            raise InvalidValueError(name, len(ordered), f"at most {MAX_TREE_NODES} paths")
        parents = tuple(places[choice[:-1]] for choice in ordered)
        return cls(parents, tuple(choice[-1] for choice in ordered))

    def within(self, widths: Sequence[int], num_nodes: int) -> StaticTree:
        """Return the first `num_nodes` nodes that exist where level i has widths[i] ranks."""
        kept = dict[int, int]()
        for node, (parent, rank) in enumerate(zip(self.parents, self.ranks, strict=True)):
            depth = self.depths[node]
            is_child = parent == BASE or parent in kept
            if is_child and depth <= len(widths) and rank < widths[depth - 1]:
                kept[node] = len(kept)
        nodes = list(kept)[:num_nodes]
        return StaticTree(subtree(self.parents, nodes), tuple(self.ranks[node] for node in nodes))

    def token_ids(self, levels: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Return the token of each node; levels: the tokens of each depth, by rank."""
        pairs = zip(self.depths, self.ranks, strict=True)
        return tuple(levels[depth - 1][rank] for depth, rank in pairs)

    @cached_property
    def depths(self) -> list[int]:
        """The depth of each node, from 1 up."""
        return depths(self.parents)
