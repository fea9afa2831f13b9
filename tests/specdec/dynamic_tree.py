"""Draft trees that grow by value, one at a time: the oracle of `device_growth.TreeGrowth`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec.types.drafts.draft_tree import BASE

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Children:
    """The best children of each of N nodes, best first.

    token_ids: [N, m]. confidences: [N, m], estimates of the probability that each is the target's
    token; 0 where there is no such child.
    """

    token_ids: Integers
    confidences: Floats

    @classmethod
    def none(cls, num_nodes: int, count: int) -> Children:
        """Return nodes without children."""
        shape = (num_nodes, count)
        return cls(np.zeros(shape, np.int64), np.zeros(shape))

    def of(self, node: int) -> tuple[list[int], list[float]]:
        """Return the tokens and confidences of the children of one node."""
        is_child = self.confidences[node] > 0
        return self.token_ids[node][is_child].tolist(), self.confidences[node][is_child].tolist()


class DynamicTree:
    """A tree that grows level by level at its most valuable nodes, and keeps the best of all.

    A drafter calls `grow` with the children of the frontier, at first of the base, and runs the
    nodes of the new frontier for the next level. The chain of best children is always kept, so
    that the tree accepts at least what this chain does.
    """

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._parents: list[int] = []
        self._values: list[float] = []
        self._chain: list[int] = []
        self._frontier = [BASE]

    @property
    def frontier(self) -> list[int]:
        """Nodes whose children come next, the most valuable first; indices before `best`."""
        return self._frontier

    def grow(self, children: Children, width: int) -> list[int]:
        """Add `width` children of each node of the frontier; return the new one, as wide at most.

        Further children are ignored, so that a tree does not depend on those that grow beside it.
        """
        assert len(children.token_ids) == len(self._frontier), "children of other nodes"
        first = len(self._values)
        for row, parent in enumerate(self._frontier):
            token_ids, confidences = children.of(row)
            token_ids, confidences = token_ids[:width], confidences[:width]
            value = 1.0 if parent == BASE else self._values[parent]
            if token_ids and parent == (self._chain[-1] if self._chain else BASE):
                self._chain.append(len(self._values))
            self._token_ids += token_ids
            self._values += [value * each for each in confidences]
            self._parents += [parent] * len(token_ids)
        added = range(first, len(self._values))
        self._frontier = self._first(sorted(added, key=self._order), width)
        return self._frontier

    def token_of(self, node: int) -> int:
        """Return the token of a node."""
        return self._token_ids[node]

    def parent_of(self, node: int) -> int:
        """Return the parent of a node; BASE for none."""
        return self._parents[node]

    def path_of(self, node: int) -> list[int]:
        """Return the tokens on the path to a node, its own last; none for BASE."""
        tokens: list[int] = []
        while node != BASE:
            tokens.append(self._token_ids[node])
            node = self._parents[node]
        return tokens[::-1]

    def best(self, num_nodes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return tokens and parents of the most valuable nodes, siblings best first.

        They are a tree, since a value is at most that of the parent, which stands before.
        """
        kept = sorted(self._first(sorted(range(len(self._values)), key=self._order), num_nodes))
        places = {BASE: BASE} | {node: place for place, node in enumerate(kept)}
        parents = tuple(places[self._parents[node]] for node in kept)
        return tuple(self._token_ids[node] for node in kept), parents

    def _order(self, node: int) -> tuple[float, int]:
        return -self._values[node], node

    def _first(self, ordered: Sequence[int], count: int) -> list[int]:
        """Return the first `count` nodes, of which those of the chain replace the last others."""
        present = set(ordered)
        chain = [node for node in self._chain if node in present][:count]
        others = [node for node in ordered if node not in chain][: count - len(chain)]
        kept = {*chain, *others}
        return [node for node in ordered if node in kept]
