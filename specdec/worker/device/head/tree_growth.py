"""Draft trees on the device of a head with KV that drafts token by token (EAGLE, EAGLE-3, MTP).

A tree grows level by level as `worker.head.trees` has it, in fixed shapes: all rows of a step have
the levels and the width of the largest tree, of which each uses as much as it wants. A chain is a
tree of width 1. The nodes of a level run in one pass, in the KV slots after the sequence, where the
engine has reserved room. All levels are launched at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.reference.device_batch import DeviceBatch, TreeNodes
from specdec.kernels.reference.logit_edits import LogitEdits
from specdec.sampling.device.device_growth import (
    Frontier,
    GrowthShape,
    TreeGrowth,
    WantedTrees,
    growth_widths,
)
from specdec.sampling.device.device_sampler import SamplingKind
from specdec.types.drafts.draft_tree import MAX_TREE_NODES
from specdec.worker.device.head.pairs import PairDrafts
from specdec.worker.device.state import DeviceStepLimits, slots_at
from specdec.worker.device.step_graphs import StepShape


class TreePairDrafts(PairDrafts):
    """Drafts chains as PairDrafts does, or trees of all rows: `grow` after `run_pairs`."""

    def holds_tree(self, num_nodes: int, depth: int) -> bool:
        """See HeadDrafts."""
        return self.growth is not None and self.growth.holds(num_nodes, depth)

    def grow(self, kind: SamplingKind, shape: StepShape, edits: LogitEdits | None = None) -> None:
        """Draft the tree or the chain that each row wants; edits: as in `_select`."""
        assert self.growth is not None, "the host drafts trees"
        head, num_rows, tables = self.parts.head, shape.num_rows, self._tables(shape)
        wanted = self._wanted(num_rows)
        growth = TreeGrowth(self.growth, wanted)
        nodes = _RunNodes(self._ends[:num_rows].clamp_min(2), wanted, self.growth)
        outputs = self._outputs[:num_rows, None]
        paths = self._tokens.new_zeros(num_rows, 1, 0)
        for level in range(self.growth.depth):
            logits = head.output_logits(outputs.flatten(0, 1))
            children = self._children(logits, level, self.growth.width, kind, edits, paths)
            frontier = growth.add_level(children)
            if level + 1 < self.growth.depth:
                batch = nodes.batch(frontier, tables, self._limits)
                outputs = self._advance(batch, frontier, outputs)
                if edits is not None:
                    paths = _extended(paths, frontier)
        self._keep(growth.best(), growth.chains(), wanted.is_tree)

    def _wanted(self, num_rows: int) -> WantedTrees:
        """Return the sizes of the drafts, as `HeadRunner` finds them."""
        rows, ends = self._own_rows(num_rows), self._ends[:num_rows]
        count, is_tree = rows.num_wanted, rows.depth > 0
        depths = torch.where(is_tree, torch.minimum(count, rows.depth), count)
        widths = growth_widths(count, depths)
        is_tree = is_tree & (ends + widths * (depths - 1) <= self._limits.max_model_len)
        return WantedTrees(
            num_nodes=torch.where(is_tree, count, depths),
            depths=depths,
            widths=torch.where(is_tree, widths, 1),
        )

    def _advance(self, batch: DeviceBatch, frontier: Frontier, outputs: Tensor) -> Tensor:
        """Run the nodes of the frontier; return their outputs, [num_rows, W, hidden_size].

        outputs: of the frontier before, [num_rows, F, hidden_size].
        """
        head, size = self.parts.head, outputs.shape[2]
        index = frontier.parent_places[:, :, None].expand(-1, -1, size)
        features = head.next_features(outputs.gather(1, index).flatten(0, 1))
        found = head.run_on_device(batch, features, self.parts.kv_cache)
        return found.view(*frontier.token_ids.shape, -1)


class _RunNodes:
    """The nodes of growing trees that have KV: w on each level of a tree of width w.

    Node i has the i-th slot after the sequence, and the place of a missing one is empty: its token
    sees the text alone, and no node sees it.
    """

    def __init__(self, ends: Tensor, wanted: WantedTrees, growth: GrowthShape) -> None:
        """Start without a node. ends: lengths of the sequences, [B] int64."""
        self._ends, self._wanted, self._growth = ends[:, None], wanted, growth
        self._places = torch.arange(growth.width, device=ends.device)
        self._words = torch.zeros_like(ends)[:, None]  # the nodes that the frontier before sees
        self._level = 0

    def batch(self, frontier: Frontier, tables: Tensor, limits: DeviceStepLimits) -> DeviceBatch:
        """Return the input of the pass over the next level; tables: [B, num_blocks]."""
        widths, level = self._wanted.widths[:, None], self._level
        index = level * widths + self._places
        runs = level < self._wanted.depths[:, None] - 1
        is_written = runs & (self._places < widths)
        bits = torch.ones_like(index) << index.clamp_max(MAX_TREE_NODES - 1)
        own = torch.where(frontier.is_node & is_written, bits, 0)
        words = self._words.gather(1, frontier.parent_places)
        self._words = torch.where(own != 0, words | own, 0)
        self._level += 1
        size = limits.block_size
        last = tables.shape[1] * size - 1  # rows that have ended may be at the end of their table
        slots = slots_at((self._ends + index).clamp_max(last), tables, size)
        nodes = torch.arange(self._level * self._growth.width, device=index.device)
        context = self._ends + torch.where(runs, self._level * widths, 0)
        return DeviceBatch(
            input_ids=frontier.token_ids.masked_fill(own == 0, 0).flatten(),
            positions=(self._ends + level).clamp_max(last).expand_as(index).flatten(),
            slot_mapping=slots.masked_fill(~is_written, limits.padding_slot).flatten(),
            block_tables=tables,
            context_lens=context.clamp_max(last + 1).squeeze(1),
            query_len=self._growth.width,
            trees=TreeNodes(
                words=self._words.flatten(),
                first_nodes=self._ends.squeeze(1),
                positions=self._ends + nodes // widths,
            ),
        )


def _extended(paths: Tensor, frontier: Frontier) -> Tensor:
    """Return the tokens on the paths to the frontier, [B, W, level + 1].

    paths: to the frontier before, [B, F, level].
    """
    index = frontier.parent_places[:, :, None].expand(-1, -1, paths.shape[2])
    return torch.cat([paths.gather(1, index), frontier.token_ids[:, :, None]], 2)
