"""Growth of draft trees from a draft model's scores: fitted shapes, and dynamic trees by value.

Fitted: Medusa (Cai et al. 2024, arXiv 2401.10774, section 2.3 and appendix on optimized trees).
Dynamic: EAGLE-2 (Li et al. 2024, arXiv 2406.16858, sections 4.1 and 4.2): the *value* of a node is
the product of confidences along its path, an estimate of the probability that it is accepted.

Above temperature 0 the target's token is the argmax of log p + g with Gumbel noise g that the
draft shares. Children are therefore ranked by log q + g, not by q; at temperature 0 both are equal.
`device_children.confidences_of_scores` turns these scores into confidences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from specdec.sampling.device.device_children import DeviceChildren
from specdec.types.drafts.draft_tree import BASE
from specdec.types.drafts.static_tree import Choice

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def fitted_choices(
    rates: Sequence[Sequence[float]], num_nodes: int, *, with_chain: bool = False
) -> list[Choice]:
    """Return the choices with the most expected accepted tokens, in any order.

    A greedy choice is optimal: no node is accepted more often than its parent.

    rates: by depth and rank, the probability that the token is the target's, ranks of a depth in
    descending order; a rank with rate 0 is never chosen. with_chain: whether the chain of first
    ranks is always among the choices, so that the tree accepts at least what this chain does.
    """
    chain = [(0,) * depth for depth in range(1, len(rates) + 1)] if with_chain else []
    chosen: list[Choice] = chain[:num_nodes]
    heap: list[tuple[float, Choice]] = []

    def offer(choice: Choice, parent_rate: float) -> None:
        depth, rank = len(choice) - 1, choice[-1]
        if depth < len(rates) and rank < len(rates[depth]) and rates[depth][rank] > 0:
            heappush(heap, (-parent_rate * rates[depth][rank], choice))

    offer((0,), 1.0)
    while heap and len(chosen) < num_nodes:
        negative, choice = heappop(heap)
        if choice not in chain:
            chosen.append(choice)
        offer((*choice, 0), -negative)
        *before, rank = choice
        offer((*before, rank + 1), -negative / rates[len(before)][rank])
    return chosen


@dataclass(frozen=True, eq=False)
class Children:
    """The best children of each of N nodes, best first.

    token_ids: [N, m]. confidences: [N, m], estimates of the probability that each is the target's
    token; 0 where there is no such child.
    """

    token_ids: Integers
    confidences: Floats

    @classmethod
    def of_tensors(cls, found: DeviceChildren) -> Children:
        """Copy children to the host."""
        return cls(found.token_ids.cpu().numpy(), found.confidences.cpu().numpy())

    @classmethod
    def none(cls, num_nodes: int, count: int) -> Children:
        """Return nodes without children."""
        shape = (num_nodes, count)
        return cls(np.zeros(shape, np.int64), np.zeros(shape))

    def put(self, nodes: Sequence[int], others: Children) -> None:
        """Replace the children of some nodes, in place."""
        index = list(nodes)
        self.token_ids[index], self.confidences[index] = others.token_ids, others.confidences

    def take(self, nodes: Sequence[int]) -> Children:
        """Return the children of some nodes."""
        index = list(nodes)
        return Children(self.token_ids[index], self.confidences[index])

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
