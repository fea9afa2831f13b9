"""Draft trees in the packed input of a step on the device.

After the table of rows, a step with trees has three words for each token of each row: its parent,
its depth, and its ancestors. Rows with chains, and padding, have those of a chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from specdec.sampling.device.device_edits import chain_paths
from specdec.types.drafts.draft_tree import (
    BASE,
    MAX_TREE_NODES,
    Parents,
    ancestors,
    depths,
    signed_words,
)
from specdec.types.messages import StepRow
from specdec.worker.device.step_graphs import StepShape

_NUM_KINDS = 3
_CACHED_SHAPES = 256


class PackedTrees(NamedTuple):
    """The drafts of rows as trees; the base is the first token of each.

    parents: -1 for children of the base. depths: drafts on the path to each. words: the nodes on
    it as bits, as in `draft_tree.ancestors`; 0 in rows with chains, whose drafts may be more.
    """

    parents: Tensor  # [num_rows, Q - 1] int64
    depths: Tensor  # [num_rows, Q] int64
    words: Tensor  # [num_rows, Q] int64

    @property
    def is_tree(self) -> Tensor:
        """The rows that have trees, [num_rows] bool."""
        return self.words[:, 1] != 0

    def replaced(self, rows: Tensor, others: PackedTrees) -> PackedTrees:
        """Return the trees with those of `others` in some rows, [num_rows] bool."""
        pairs = zip(self, others, strict=True)
        return PackedTrees(*(torch.where(rows[:, None], new, own) for own, new in pairs))

    def paths(self, rows: Tensor, drafts: Tensor) -> Tensor:
        """Return the drafts before rows of logits, as `chain_paths` does for chains.

        drafts: [num_rows, Q - 1] int64.
        """
        num_drafts, query_len = drafts.shape[1], self.depths.shape[1]
        nodes = torch.arange(num_drafts, device=drafts.device)
        sequences = rows.div(query_len, rounding_mode="floor")
        own = self.words.flatten()[rows][:, None] >> nodes.clamp_max(MAX_TREE_NODES - 1) & 1
        in_tree = drafts[sequences].masked_fill((own == 0) | (nodes >= MAX_TREE_NODES), -1)
        is_tree = self.is_tree[sequences][:, None]
        return torch.where(is_tree, in_tree, chain_paths(rows, drafts))


class HeldTrees(NamedTuple):
    """The first nodes of trees that a head has drafted on the device."""

    num_nodes: Tensor  # [num_rows] int64
    token_ids: Tensor  # [num_rows, Q - 1] int64
    trees: PackedTrees


def held_trees(held: Tensor, most: Tensor, shape: StepShape) -> HeldTrees:
    """Return the first nodes of held trees, as the input of a step with trees has them.

    held: [num_rows, 1 + 2 * N] int64, as in DeviceState. most: nodes to take, [num_rows] int64.
    """
    num_nodes, num_columns = torch.minimum(held[:, 0], most), shape.query_len - 1
    largest = (held.shape[1] - 1) // 2
    columns = slice(min(largest, num_columns))
    missing = (0, max(0, num_columns - largest))
    tokens, parents = held[:, 1 : 1 + largest], held[:, 1 + largest :]
    nodes = torch.arange(num_columns, device=held.device)
    is_node = nodes < num_nodes[:, None]
    parents = pad(parents[:, columns], missing).masked_fill(~is_node, BASE)
    bits = torch.ones_like(nodes) << nodes.clamp_max(MAX_TREE_NODES - 1)
    # With the base first, whose path is empty; each round doubles the length of the paths.
    words = pad(torch.where(is_node, bits, 0), (1, 0))
    depths, above = pad(is_node.long(), (1, 0)), pad(parents + 1, (1, 0))
    for _ in range(num_columns.bit_length()):
        words, depths = words | words.gather(1, above), depths + depths.gather(1, above)
        above = above.gather(1, above)
    return HeldTrees(
        num_nodes,
        pad(tokens[:, columns], missing).masked_fill(~is_node, 0),
        PackedTrees(parents, depths, words),
    )


def num_tree_words(shape: StepShape) -> int:
    """Return the size of the part of the input with trees; 0 in a step without."""
    return shape.num_rows * _NUM_KINDS * shape.query_len if shape.has_trees else 0


def pack_trees(words: NDArray[np.int64], rows: Sequence[StepRow], shape: StepShape) -> int:
    """Write the trees of a step to the first words of a buffer; return their number."""
    size = num_tree_words(shape)
    if size:
        packed = words[:size].reshape(shape.num_rows, _NUM_KINDS, shape.query_len)
        packed[:] = _chain(shape.query_len)
        for own, row in zip(packed, rows, strict=False):
            if parents := row.drafting.parents:
                own[:, 1:] = [[BASE], [0], [0]]
                own[:, 1 : 1 + len(parents)] = _words_of(parents)
    return size


def unpack_trees(words: Tensor, shape: StepShape) -> PackedTrees | None:
    """Read what `pack_trees` has written."""
    if not shape.has_trees:
        return None
    packed = words[: num_tree_words(shape)].view(shape.num_rows, _NUM_KINDS, shape.query_len)
    return PackedTrees(packed[:, 0, 1:], packed[:, 1], packed[:, 2])


def _chain(query_len: int) -> NDArray[np.int64]:
    depth = np.arange(query_len)
    return np.stack([depth - 2, depth, np.zeros_like(depth)])


@lru_cache(_CACHED_SHAPES)
def _words_of(parents: Parents) -> NDArray[np.int64]:
    """Return the words of a tree, [3, len(parents)]."""
    return np.array([parents, depths(parents), signed_words(ancestors(parents))], np.int64)
