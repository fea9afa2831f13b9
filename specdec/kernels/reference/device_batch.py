"""Inputs of a forward pass whose tensors have fixed shapes and are made on the device.

A device runs such a pass as a graph, or begins it before the host knows the tokens of the step
before. `forward_batch.ForwardBatch` is the ragged batch that the host plans.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.reference.device_states import StateRows
from specdec.types.drafts.draft_tree import MAX_TREE_NODES


@dataclass(frozen=True)
class TreeNodes:
    """Trees of drafts at the ends of B sequences, of at most N nodes (`types.drafts.draft_tree`).

    A node has the KV slot of its index after the base, and the position of its depth.
    """

    words: Tensor  # [T] int64, the nodes that each token sees; 0 for one that is no node
    first_nodes: Tensor  # [B] int64, slot of the first node; the context where there is no tree
    positions: Tensor  # [B, N] int64, of the nodes

    def within(self, window: int | None, positions: Tensor, rows: Tensor) -> Tensor:
        """Return the words without the nodes that are outside of a window; [T] int64.

        positions, rows: [T] int64, of the tokens of the batch; a row is a sequence.
        """
        num_nodes = min(self.positions.shape[1], MAX_TREE_NODES)
        if window is None or window >= num_nodes:  # no path is longer
            return self.words
        nodes = torch.arange(num_nodes, device=self.words.device)
        is_near = positions[:, None] - self.positions[rows, :num_nodes] < window
        return self.words & (is_near.long() << nodes).sum(1)


@dataclass(frozen=True)
class DeviceBatch:
    """B sequences with Q tokens each: the last known token, then draft tokens.

    A sequence with fewer than Q tokens repeats its last position; the KV of these tokens goes to a
    slot of the padding block, which no sequence reads.
    """

    input_ids: Tensor  # [B * Q] int64
    positions: Tensor  # [B * Q] int64
    slot_mapping: Tensor  # [B * Q] int64: where each token's KV is written
    block_tables: Tensor  # [B, M] int64; entries after the context are valid blocks of the pool
    context_lens: Tensor  # [B] int64, the tokens of this pass included
    query_len: int  # Q
    adapters: Tensor | None = None  # [B * Q] int32, as in kernels.lora.AddUpdates; None: no adapter
    trees: TreeNodes | None = None  # None where the drafts of all sequences are chains
    states: StateRows | None = None  # None without recurrent layers

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)

    @property
    def rows(self) -> Tensor:
        """The sequence of each token, [B * Q] int64."""
        index = torch.arange(len(self.input_ids), device=self.input_ids.device)
        return index.div(self.query_len, rounding_mode="floor")


@dataclass(frozen=True)
class RaggedBatch:
    """T tokens of B sequences that may have different lengths: prompts, decodes and drafts.

    The tokens of a sequence are consecutive, in its order. Padding after the last sequence, and
    drafts that a sequence turns out not to have, are stored in the padding block. A sequence may
    have no token.
    """

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64: where each token's KV is written
    rows: Tensor  # [T] int64: the sequence of each token; any for padding
    cu_seqlens: Tensor  # [B + 1] int32: sequence i has the tokens from cu_seqlens[i] on
    block_tables: Tensor  # [B, M] int64; entries after the context are valid blocks of the pool
    context_lens: Tensor  # [B] int64, the tokens of this pass included
    decode_len: int
    """Most tokens of a sequence that decodes, which sizes the tiles of short queries."""
    adapters: Tensor | None = None  # [T] int32, as in DeviceBatch
    trees: TreeNodes | None = None
    states: StateRows | None = None

    def one_by_one(self) -> DeviceBatch:
        """Return the batch with each token as a sequence, which the KV that it sees precedes."""
        trees, context_lens = self.trees, self.positions + 1
        if trees is not None:
            is_node, first_nodes = trees.words != 0, trees.first_nodes[self.rows]
            context_lens = torch.where(is_node, self.context_lens[self.rows], context_lens)
            trees = TreeNodes(
                words=trees.words,
                first_nodes=torch.where(is_node, first_nodes, context_lens),
                positions=trees.positions[self.rows],
            )
        return DeviceBatch(
            self.input_ids,
            self.positions,
            self.slot_mapping,
            block_tables=self.block_tables[self.rows],
            context_lens=context_lens,
            query_len=1,
            trees=trees,
        )


AnyDeviceBatch = DeviceBatch | RaggedBatch
