"""State of a rank's sequences that is on the device between their steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.config.gpu.graph_sizes import MAX_GRAPH_TOKENS
from specdec.types.messages import BlockTableDelta


@dataclass(frozen=True)
class DeviceStepLimits:
    """Sizes of the buffers of a rank's steps on the device.

    num_blocks: of the pool; the block after them is for padding. max_step_tokens: of all sequences
    together in a step with prompts; 0 where the host runs prompts. max_draft_tokens: of a chain;
    max_tree_nodes: of a tree, 0 where the host runs trees. max_tree_depth: drafts of a tree that
    follow each other, where a head drafts it. has_states: whether layers are recurrent.
    """

    max_num_seqs: int
    max_draft_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_step_tokens: int = 0
    max_tree_nodes: int = 0
    max_tree_depth: int = 0
    has_states: bool = False

    @property
    def max_query_len(self) -> int:
        """Most tokens of a sequence in a step: the last known one, then drafts."""
        return 1 + max(self.max_draft_tokens, self.max_tree_nodes)

    @property
    def max_scored_tokens(self) -> int:
        """Most last known tokens and drafts of a step, padding included.

        Many sequences with large trees are left to the host: one tree makes all rows as long.
        """
        of_trees = min(self.max_num_seqs * self.max_query_len, MAX_GRAPH_TOKENS)
        return max(self.max_num_seqs * (1 + self.max_draft_tokens), of_trees)

    @property
    def max_growing_rows(self) -> int:
        """Most sequences of a step after which trees are drafted: the next one has to hold them.

        Padding is included; 0 without trees.
        """
        return self.max_scored_tokens // (1 + self.max_tree_nodes) if self.max_tree_nodes else 0

    @property
    def blocks_of_longest(self) -> int:
        """Blocks of a sequence of max_model_len tokens."""
        return -(-self.max_model_len // self.block_size)

    @property
    def padding_slot(self) -> int:
        """The first slot of KV that no sequence reads: of the block after the pool."""
        return self.num_blocks * self.block_size


class DeviceState:
    """State of the sequences of a rank that is on the device, by a place for each.

    The place after the last is for rows of padding.
    """

    def __init__(self, limits: DeviceStepLimits, device: torch.device) -> None:
        num_places = limits.max_num_seqs + 1
        size = (num_places, limits.blocks_of_longest)
        self.tables = torch.full(size, limits.num_blocks, dtype=torch.int64, device=device)
        self.num_tokens = torch.ones(num_places, dtype=torch.int64, device=device)
        self.last_tokens = torch.zeros(num_places, dtype=torch.int64, device=device)
        # What a head has drafted after them: the number of tokens, then the tokens.
        held = (num_places, 1 + limits.max_draft_tokens)
        self.held_drafts = torch.zeros(held, dtype=torch.int64, device=device)
        # Of trees the number of nodes, tokens and parents; `held_drafts` has the first path.
        of_trees = (num_places, 1 + 2 * limits.max_tree_nodes)
        self.held_trees = torch.zeros(of_trees, dtype=torch.int64, device=device)
        self.padding_place = limits.max_num_seqs
        self._free = list(reversed(range(limits.max_num_seqs)))
        self._places: dict[int, int] = {}
        self._num_valid: dict[int, int] = {}  # entries of a table that are on the device

    def update(self, released: Sequence[int], deltas: Sequence[BlockTableDelta]) -> None:
        """Drop released sequences, and the ends of tables that have changed."""
        for seq_id in released:
            if seq_id in self._places:
                self._free.append(self._places.pop(seq_id))
                del self._num_valid[seq_id]
        for delta in deltas:
            if delta.seq_id in self._num_valid:
                num_valid = self._num_valid[delta.seq_id]
                self._num_valid[delta.seq_id] = min(num_valid, delta.start)

    def has_place(self, seq_id: int) -> bool:
        """Return whether there is a place for a sequence; takes a free one if it has none."""
        if seq_id in self._places:
            return True
        if not self._free:
            return False
        self._places[seq_id] = self._free.pop()
        self._num_valid[seq_id] = 0
        return True

    def place(self, seq_id: int) -> int:
        """Return the place of a sequence, which has one."""
        return self._places[seq_id]

    def places(self, seq_ids: Iterable[int]) -> list[int]:
        """Return the places of sequences, which have some."""
        return [*map(self._places.__getitem__, seq_ids)]

    def table_changes(
        self, seq_ids: Sequence[int], tables: Iterable[Sequence[int]]
    ) -> list[tuple[int, int, int]]:
        """Return the entries of tables that the device lacks: place, index and block of each."""
        num_valid, changes = self._num_valid, []
        for seq_id, table in zip(seq_ids, tables, strict=True):
            start = num_valid[seq_id]
            if start < len(table):
                place, num_valid[seq_id] = self._places[seq_id], len(table)
                changes += [(place, index, table[index]) for index in range(start, len(table))]
        return changes

    def forget_tables(self, seq_ids: Iterable[int]) -> None:
        """Write the tables of sequences again with their next step."""
        for seq_id in seq_ids:
            self._num_valid[seq_id] = 0

    def send_changes(self, changes: Sequence[tuple[int, int, int]]) -> None:
        """Write entries of tables that the host has, before the next step; does not wait."""
        device = self.tables.device
        words = torch.tensor(changes, pin_memory=device.type == "cuda")
        self.write_tables(words.to(device, non_blocking=True))

    def write_tables(self, changes: Tensor) -> None:
        """Write entries of tables; changes: [N, 3] int64, as from `table_changes`."""
        self.tables.index_put_((changes[:, 0], changes[:, 1]), changes[:, 2])


def slots_at(positions: Tensor, tables: Tensor, block_size: int) -> Tensor:
    """Return the slots [num_rows, Q] at positions; tables: [num_rows, num_blocks]."""
    slots: Tensor = tables.gather(1, positions // block_size) * block_size + positions % block_size
    return slots
