"""Growth of draft trees from a draft model's scores: static trees, and dynamic ones by value.

Static: Medusa (Cai et al. 2024, arXiv 2401.10774, section 2.3 and appendix on optimized trees).
Dynamic: EAGLE-2 (Li et al. 2024, arXiv 2406.16858, sections 4.1 and 4.2): the *value* of a node is
the product of confidences along its path, an estimate of the probability that it is accepted.

Above temperature 0 the target's token is the argmax of log p + g with Gumbel noise g that the
draft shares. Children are therefore ranked by log q + g, not by q; at temperature 0 both are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from specdec.types.draft_tree import BASE, MAX_TREE_NODES
from specdec.types.errors import InvalidValueError

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

Choice = tuple[int, ...]
"""A node by the ranks among siblings on its path, 0 for the best: () is the base."""


@dataclass(frozen=True)
class StaticTree:
    """A tree whose shape does not depend on the text.

    parents: as in `specdec.types.draft_tree`. ranks: of each node among its possible siblings.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    @classmethod
    def of_choices(cls, choices: Sequence[Sequence[int]]) -> StaticTree:
        """Return the tree of Medusa's choices, such as [[0], [1], [0, 0]], in any order.

        Raises InvalidValueError for a repeated choice, one without its parent, and more than
        MAX_TREE_NODES.
        """
        ordered = sorted(map(tuple, choices), key=lambda choice: (len(choice), choice))
        places: dict[Choice, int] = {(): BASE}
        for place, choice in enumerate(ordered):
            if choice in places or choice[:-1] not in places or min(choice) < 0:
                limit = "ranks from 0 up, once, with all beginnings of the path listed too"
                raise InvalidValueError("tree choice", list(choice), limit)
            places[choice] = place
        if len(ordered) > MAX_TREE_NODES:
            raise InvalidValueError("tree choices", len(ordered), f"at most {MAX_TREE_NODES}")
        parents = tuple(places[choice[:-1]] for choice in ordered)
        return cls(parents, tuple(choice[-1] for choice in ordered))


def fitted_choices(rates: Sequence[Sequence[float]], num_nodes: int) -> list[Choice]:
    """Return the choices with the most expected accepted tokens, the best first.

    rates: by depth and rank, the share of drafts whose token was the target's, ranks of a depth in
    descending order. A greedy choice is optimal: no node is accepted more often than its parent.
    """
    chosen: list[Choice] = []
    heap: list[tuple[float, Choice]] = []

    def offer(choice: Choice, parent_rate: float) -> None:
        depth, rank = len(choice) - 1, choice[-1]
        if depth < len(rates) and rank < len(rates[depth]):
            heappush(heap, (-parent_rate * rates[depth][rank], choice))

    offer((0,), 1.0)
    while heap and len(chosen) < num_nodes:
        negative, choice = heappop(heap)
        chosen.append(choice)
        offer((*choice, 0), -negative)
        *before, rank = choice
        offer((*before, rank + 1), -negative / rates[len(before)][rank])
    return chosen


@dataclass(frozen=True, eq=False)
class Children:
    """The best children of each of N nodes, best first.

    token_ids: [N, m]. confidences: [N, m], estimates of the probability that each is the target's
    token.
    """

    token_ids: Integers
    confidences: Floats


def best_children(scores: Floats, count: int, tau: float = 1.0) -> Children:
    """Return the `count` best children of each node; equal scores are ordered by token id.

    scores: [N, vocab_size], log q, plus the target's noise above temperature 0. tau: temperature of
    the softmax that turns scores into confidences, fitted to acceptance by rank; 1 for log q alone.
    """
    token_ids = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    shifted = (scores - scores.max(axis=1, keepdims=True)) / tau
    weights = np.exp(shifted)
    confidences = np.take_along_axis(weights, token_ids, axis=1)
    return Children(token_ids, confidences / weights.sum(axis=1, keepdims=True))


class DynamicTree:
    """A tree that grows level by level at its most valuable nodes, and keeps the best of all.

    A drafter calls `grow` with the children of the frontier, at first of the base, and runs the
    nodes of the new frontier for the next level.
    """

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._parents: list[int] = []
        self._values: list[float] = []
        self._frontier = [BASE]

    @property
    def frontier(self) -> list[int]:
        """Nodes whose children come next, the most valuable first; indices before `best`."""
        return self._frontier

    def grow(self, children: Children, width: int) -> list[int]:
        """Add the children of the frontier; return the new frontier, at most `width` of them."""
        assert len(children.token_ids) == len(self._frontier), "children of other nodes"
        first = len(self._values)
        for row, parent in enumerate(self._frontier):
            value = 1.0 if parent == BASE else self._values[parent]
            self._token_ids += children.token_ids[row].tolist()
            self._values += (value * children.confidences[row]).tolist()
            self._parents += [parent] * children.token_ids.shape[1]
        added = range(first, len(self._values))
        self._frontier = sorted(added, key=lambda node: (-self._values[node], node))[:width]
        return self._frontier

    def token_of(self, node: int) -> int:
        """Return the token of a node of the frontier."""
        return self._token_ids[node]

    def best(self, num_nodes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return tokens and parents of the most valuable nodes, siblings best first.

        They are a tree, since a value is at most that of the parent, which stands before.
        """
        kept = best_nodes(self._values, num_nodes)
        places = {BASE: BASE} | {node: place for place, node in enumerate(kept)}
        parents = tuple(places[self._parents[node]] for node in kept)
        return tuple(self._token_ids[node] for node in kept), parents


def best_nodes(values: Sequence[float], num_nodes: int) -> list[int]:
    """Return the indices of the highest values in ascending order; of equal ones the first."""
    order = sorted(range(len(values)), key=lambda node: (-values[node], node))
    return sorted(order[:num_nodes])
