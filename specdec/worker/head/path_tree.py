"""Draft trees that grow best first, where children depend on the path.

The nodes of a tree are those of `specdec.kernels.best_first`, in its order: the chain of best
children, then the nodes with the largest survival, of equal ones the shallower, then that with the
lower parent, then that with the lower rank.

The children of a level are found together, for the chain and the nodes of the better half of each
tree so far. Later levels push most nodes of the other half out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.types.drafts.draft_tree import BASE, TokenTree
from specdec.worker.head.sampler import DraftEnd, PartialDraft

_NODE = np.dtype(
    [
        ("tree", "i8"),
        ("log_survival", "f8"),
        ("is_chain", "?"),
        ("token_id", "i8"),
        ("parent", "i8"),
        ("depth", "i8"),
        ("parent_row", "i8"),
    ]
)
_NUM_TRIED = 4
"""Children of each node that bound the survival of the others."""

_Nodes = NDArray[Any]
"""Nodes by tree, in order. parent: its index, or BASE. parent_row: in the frontier before."""


class PathTrees:
    """Trees that grow together, level by level: `add_level` for each, then `finish`.

    The rows of a level are its frontier, the nodes whose children come next, by tree.
    """

    def __init__(self, drafts: Sequence[PartialDraft]) -> None:
        self._drafts, self._level = drafts, 0
        sizes = np.array([(draft.num_wanted, draft.depth) for draft in drafts])
        self._num_wanted, self._depths = sizes.T
        self._most_ranks = self._num_wanted - self._depths + 1  # the chain takes the other nodes
        self._num_parents = np.maximum(self._num_wanted // 2, self._depths)
        self._nodes: _Nodes = np.zeros(0, _NODE)
        self._frontier = np.full(len(drafts), BASE)
        self._trees = np.arange(len(drafts))
        self._paths = np.zeros((len(drafts), 0), np.int64)

    @property
    def num_rows(self) -> int:
        """Return the number of rows of the next level."""
        return len(self._frontier)

    @property
    def num_ranks(self) -> int:
        """Return the most children that a row may have."""
        return int(self._most_ranks[self._trees].max())

    @property
    def frontier(self) -> tuple[list[int], list[int]]:
        """Return the parents' rows and the tokens of the rows, after the first level."""
        nodes = self._nodes[self._frontier]
        return nodes["parent_row"].tolist(), nodes["token_id"].tolist()

    def ends(self) -> Iterator[DraftEnd]:
        """Yield the places after the rows."""
        for tree, path in zip(self._trees.tolist(), self._paths.tolist(), strict=True):
            yield self._drafts[tree].after(path)

    def add_level(self, token_ids: NDArray[np.int64], confidences: NDArray[np.float64]) -> None:
        """Add the children of the rows, [num_rows, at least num_ranks], best first."""
        every = np.concatenate([self._nodes, self._children(token_ids, confidences)])
        values = np.where(every["is_chain"], np.inf, every["log_survival"])
        order = np.lexsort((-values, every["tree"]))
        trees = every["tree"][order]
        places = np.arange(len(order)) - self._firsts(trees)[trees]
        is_kept = places < self._num_wanted[trees]
        order, trees, places = order[is_kept], trees[is_kept], places[is_kept]
        index_of = np.full(len(every) + 1, BASE)  # the last one is that of the base
        index_of[order] = np.arange(len(order))
        self._nodes, self._level = every[order], self._level + 1
        self._nodes["parent"] = index_of[self._nodes["parent"]]
        is_next = (self._nodes["depth"] == self._level) & (places < self._num_parents[trees])
        self._frontier = np.flatnonzero(is_next & (self._level < self._depths[trees]))
        nodes, self._trees = self._nodes[self._frontier], trees[self._frontier]
        before = self._paths[nodes["parent_row"]]
        self._paths = np.concatenate([before, nodes["token_id"][:, None]], axis=1)

    def _children(self, token_ids: NDArray[np.int64], confidences: NDArray[np.float64]) -> _Nodes:
        """Return the children that may be kept, by row and rank."""
        with np.errstate(divide="ignore"):
            values = np.log(confidences)
        above, begins = self._nodes["log_survival"], self._level == 0
        values += 0.0 if begins else above[self._frontier, None]
        values[np.arange(values.shape[1]) >= self._most_ranks[self._trees, None]] = -np.inf
        is_chain = np.zeros(values.shape, np.bool_)
        is_chain[:, 0] = begins or self._nodes["is_chain"][self._frontier]
        least = self._least_kept(values[:, :_NUM_TRIED])[self._trees, None]
        rows, ranks = np.nonzero((is_chain | (values >= least)) & (values > -np.inf))
        nodes: _Nodes = np.zeros(len(rows), _NODE)
        nodes["log_survival"], nodes["is_chain"] = values[rows, ranks], is_chain[rows, ranks]
        nodes["token_id"], nodes["parent"] = token_ids[rows, ranks], self._frontier[rows]
        nodes["tree"], nodes["depth"] = self._trees[rows], self._level + 1
        nodes["parent_row"] = rows
        return nodes

    def _least_kept(self, best: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return a survival that enough nodes of each tree have, [num_trees].

        best: the survival of the best children of each row, [num_rows, any].
        """
        trees = np.concatenate([self._nodes["tree"], np.repeat(self._trees, best.shape[1])])
        values = np.concatenate([self._nodes["log_survival"], best.ravel()])
        values = values[np.lexsort((-values, trees))]
        counts = np.bincount(trees, minlength=len(self._drafts))
        lasts = np.cumsum(counts) - counts + np.minimum(self._num_wanted, counts) - 1
        return np.where(counts < self._num_wanted, -np.inf, values[lasts])

    def finish(self) -> None:
        """Set the trees of the drafts."""
        firsts, parents = self._firsts(self._nodes["tree"]), self._nodes["parent"]
        parents = np.where(parents == BASE, BASE, parents - firsts[self._nodes["tree"]])
        pairs = pairwise([*firsts.tolist(), len(parents)])
        columns = self._nodes["token_id"].tolist(), parents.tolist()
        for draft, (first, end) in zip(self._drafts, pairs, strict=True):
            draft.set_tree(TokenTree(*(column[first:end] for column in columns)))

    def _firsts(self, trees: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of the first node of each tree, [num_trees]. trees: ascending."""
        return np.searchsorted(trees, np.arange(len(self._drafts)))
