"""The input of a step on the device: words that the host packs, and what the device reads of them.

After a table with the rows of the step, padding included, come their trees of drafts, if there are
any, changes of block tables, and where rows have prompts the tokens of all rows, one after the
other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from specdec.sampling.device.device_edits import chain_paths
from specdec.types.messages import BASE_MODEL
from specdec.worker.batch.batch_state import SequenceState
from specdec.worker.device.input.columns import StepColumns
from specdec.worker.device.input.rows import flat_tokens, num_tokens
from specdec.worker.device.input.tree_input import (
    PackedTrees,
    held_trees,
    num_tree_words,
    pack_trees,
    unpack_trees,
)
from specdec.worker.device.rules import PARAM_WORDS
from specdec.worker.device.state import DeviceState, DeviceStepLimits
from specdec.worker.device.step_graphs import StepShape

_DELTA_WORDS = 3  # sequence, entry, block
_DELTAS_PER_ROW = 2


class Word(IntEnum):
    """Columns of a row of the packed input, int64, after the record of its sampling parameters.

    START: position of the last known token, unless IS_PENDING: then that and the token are on the
    device, and so are at most NUM_DRAFTS drafts of a head, and MAX_END is that of the
    StepRow. NUM_KEPT: as in DeviceTrees. NUM_NEXT: draft tokens that the head makes
    after the row, 0 if it does not sample. END: of its tokens among those of all rows. SAMPLES: 0
    for a chunk of a prompt that more of it follows. HAS_HEAD: whether the head runs its tokens.
    ADAPTER: the place of its adapter, 0 without one. NEXT_DEPTH: of the tree after the row, 0 for
    a chain. HELD_DEPTH: as in RowDrafting. NUM_LOOKUP: draft tokens to look up after the row.
    STATE_SLOT: of its states in recurrent layers; that after the last for padding.
    TOKENS: the last known token, then drafts, in all further columns.
    """

    SLOT = PARAM_WORDS
    START = PARAM_WORDS + 1
    NUM_DRAFTS = PARAM_WORDS + 2
    IS_PENDING = PARAM_WORDS + 3
    NUM_PROMPT = PARAM_WORDS + 4
    NUM_KEPT = PARAM_WORDS + 5
    MAX_END = PARAM_WORDS + 6
    NUM_NEXT = PARAM_WORDS + 7
    END = PARAM_WORDS + 8
    SAMPLES = PARAM_WORDS + 9
    HAS_HEAD = PARAM_WORDS + 10
    ADAPTER = PARAM_WORDS + 11
    NEXT_DEPTH = PARAM_WORDS + 12
    HELD_DEPTH = PARAM_WORDS + 13
    NUM_LOOKUP = PARAM_WORDS + 14
    STATE_SLOT = PARAM_WORDS + 15
    TOKENS = PARAM_WORDS + 16


class Packed(NamedTuple):
    """The input of a step on the device, by row.

    table: all columns. starts, first: position and id of the last known token. drafts: after it,
    num_drafts of them. params: records of SAMPLE_PARAMS. changes: of block tables. trees: None
    where the drafts of all rows are chains.
    """

    table: Tensor  # [num_rows, Word.TOKENS + Q] int64
    params: Tensor  # [num_rows, PARAM_WORDS] int64
    places: Tensor  # [num_rows] int64, like the next three
    starts: Tensor
    first: Tensor
    num_drafts: Tensor
    drafts: Tensor  # [num_rows, Q - 1] int64
    changes: Tensor  # [num_changes, 3] int64
    trees: PackedTrees | None = None

    def indices(self, offsets: Tensor) -> Tensor:
        """Return the index [num_rows, Q] of the KV of the last known token and those after it.

        offsets: [Q], from 0 on. Tokens after the drafts have the index of the last one.
        """
        return self.starts[:, None] + torch.minimum(offsets, self.num_drafts[:, None])

    def positions(self, offsets: Tensor) -> Tensor:
        """Return the positions [num_rows, Q] of these tokens: as `indices`, in trees by depth."""
        return self.indices(offsets if self.trees is None else self.trees.depths)

    def drafts_before(self, rows: Tensor) -> Tensor:
        """Return the drafts before rows of logits, as `apply_edits` takes them."""
        if self.trees is None:
            return chain_paths(rows, self.drafts)
        return self.trees.paths(rows, self.drafts)


def num_words(shape: StepShape, num_flat: int = 0) -> int:
    """Return the size of the packed input of a step. num_flat: tokens of all rows, or 0."""
    row_words = Word.TOKENS + shape.query_len + _DELTAS_PER_ROW * _DELTA_WORDS
    return shape.num_rows * row_words + num_tree_words(shape) + num_flat


def most_words(limits: DeviceStepLimits) -> int:
    """Return the most words of an input: of all tokens that are scored, and of prompts."""
    row_words = Word.TOKENS + _DELTAS_PER_ROW * _DELTA_WORDS
    token_words = num_words(StepShape(1, 1, 0, has_trees=limits.max_tree_nodes > 0)) - row_words
    of_rows = limits.max_num_seqs * row_words + limits.max_scored_tokens * token_words
    return of_rows + limits.max_step_tokens


class StepPacker:
    """Packs steps on the host, and reads them on the device."""

    def __init__(
        self,
        limits: DeviceStepLimits,
        state: DeviceState,
        adapter_places: Mapping[int, int] | None = None,
        *,
        holds_drafts: bool,
    ) -> None:
        """adapter_places: as in DeviceDecoder; they change with the loaded adapters.

        holds_drafts: whether the device has drafts of a head for pending rows.
        """
        self._limits, self._state, self._holds_drafts = limits, state, holds_drafts
        self._adapter_places = {} if adapter_places is None else adapter_places

    def pack(
        self,
        words: NDArray[np.int64],
        columns: StepColumns,
        states: Sequence[SequenceState],
        shape: StepShape,
        num_kept: Sequence[int],
        *,
        is_ragged: bool = False,
    ) -> None:
        """Write a step to the words of a host buffer, and rows of padding after its own."""
        count = len(columns)
        table = _table(words, shape)
        self._pack_rows(table[:count], columns, states)
        table[:count, Word.NUM_KEPT] = num_kept
        if is_ragged:
            table[:count, Word.END] = [*accumulate(map(num_tokens, columns.rows))]
        self._pack_padding(table[count:], table[count - 1, Word.END])
        size = table.size + pack_trees(words[table.size :], columns.rows, shape)
        tables = (state.block_table for state in states)
        changes = self._state.table_changes(columns["seq_id"], tables)
        size += self._pack_changes(words[size:], changes, shape)
        if is_ragged:
            flat = flat_tokens(columns.rows)
            words[size:][: len(flat)] = flat

    def pack_padding(self, words: NDArray[np.int64], shape: StepShape) -> None:
        """Write a step of padding alone."""
        table = _table(words, shape)
        self._pack_padding(table, 0)
        size = table.size + pack_trees(words[table.size :], (), shape)
        self._pack_changes(words[size:], [], shape)

    def _pack_padding(self, table: NDArray[np.int64], end: int) -> None:
        table[:] = 0
        table[:, Word.SLOT] = self._state.padding_place
        table[:, Word.STATE_SLOT] = self._limits.max_num_seqs
        table[:, Word.END] = end

    def _pack_rows(
        self, table: NDArray[np.int64], columns: StepColumns, states: Sequence[SequenceState]
    ) -> None:
        """Write the rows [num_rows, Word.TOKENS + Q] of a step, but NUM_KEPT and END."""
        records = b"".join([state.sample_params for state in states])
        table[:, PARAM_WORDS:] = 0
        table[:, :PARAM_WORDS] = np.frombuffer(records, np.int64).reshape(len(table), -1)
        table[:, Word.SLOT] = self._state.places(columns["seq_id"])
        table[:, Word.START] = columns.starts
        table[:, Word.NUM_DRAFTS] = columns.num_drafts
        table[:, Word.IS_PENDING] = columns.is_pending
        table[:, Word.NUM_PROMPT] = [state.admission.num_prompt_tokens for state in states]
        table[:, Word.MAX_END] = columns["max_end"]
        table[:, Word.SAMPLES] = columns.samples
        if any(columns["num_next"]):
            table[:, Word.NUM_NEXT] = columns.num_next_drafts
            table[:, Word.HAS_HEAD] = np.array(columns["num_next"]) > 0
            table[:, Word.NEXT_DEPTH] = columns["next_depth"]
        if any(columns["num_lookup"]):
            table[:, Word.NUM_LOOKUP] = columns.num_lookups
        if columns.has_held_drafts:
            table[:, Word.HELD_DEPTH] = columns["held_depth"]
        if columns.has_adapters:
            places = {BASE_MODEL: 0, **self._adapter_places}
            table[:, Word.ADAPTER] = [places[each] for each in columns["adapter_id"]]
        if self._limits.has_states:
            table[:, Word.STATE_SLOT] = [state.state_slot for state in states]
        columns.write_tokens(table[:, Word.TOKENS :])

    def _pack_changes(
        self,
        words: NDArray[np.int64],
        changes: Sequence[tuple[int, int, int]],
        shape: StepShape,
    ) -> int:
        """Write changes of block tables; return the number of words."""
        most = _DELTAS_PER_ROW * shape.num_rows
        if len(changes) > most:  # of a prompt
            self._state.send_changes(changes[most:])
        deltas = words[: most * _DELTA_WORDS].reshape(most, _DELTA_WORDS)
        deltas[:] = (self._state.padding_place, 0, self._limits.num_blocks)
        if changes:
            deltas[: len(changes)] = changes[:most]
        return deltas.size

    def unpack(self, words: Tensor, shape: StepShape) -> Packed:
        """Read the input buffer; for pending rows their token and position from the state."""
        table = rows_of(words, shape)
        behind = words[table.numel() : num_words(shape)]
        changes = behind[num_tree_words(shape) :].view(-1, _DELTA_WORDS)
        places, is_pending = table[:, Word.SLOT], table[:, Word.IS_PENDING] > 0
        lengths, last_tokens = self._state.num_tokens[places], self._state.last_tokens[places]
        starts = torch.where(is_pending, lengths - 1, table[:, Word.START])
        packed = Packed(
            table=table,
            params=table[:, :PARAM_WORDS],
            places=places,
            starts=starts,
            first=torch.where(is_pending, last_tokens, table[:, Word.TOKENS]),
            num_drafts=table[:, Word.NUM_DRAFTS],
            drafts=table[:, Word.TOKENS + 1 :],
            changes=changes,
            trees=unpack_trees(behind, shape),
        )
        return self._with_held(packed, is_pending, shape) if self._holds_drafts else packed

    def _with_held(self, packed: Packed, is_pending: Tensor, shape: StepShape) -> Packed:
        """Return the input with the drafts that the device has in place of those of pending rows.

        Of a tree its first nodes, where more of them are wanted than follow each other; else the
        first path, as `draft_tree.wanted_part` has it.
        """
        table, held = packed.table, self._state.held_drafts[packed.places]
        room = table[:, Word.MAX_END] - packed.starts - 1
        wanted = torch.minimum(packed.num_drafts, room).clamp_min(0)
        depth = table[:, Word.HELD_DEPTH]
        depth = torch.where(depth > 0, torch.minimum(depth, wanted), wanted)
        num_drafts = torch.minimum(held[:, 0], depth)
        own = held[:, 1 : shape.query_len]
        trees = packed.trees
        if trees is not None:  # which may be larger than the chains that a head drafts here
            own = pad(own, (0, packed.drafts.shape[1] - own.shape[1]))
            found = held_trees(self._state.held_trees[packed.places], wanted, shape)
            is_tree = (wanted > depth) & (found.num_nodes > 0)
            own = torch.where(is_tree[:, None], found.token_ids, own)
            num_drafts = torch.where(is_tree, found.num_nodes, num_drafts)
            trees = trees.replaced(is_pending & is_tree, found.trees)
        return packed._replace(
            num_drafts=torch.where(is_pending, num_drafts, packed.num_drafts),
            drafts=torch.where(is_pending[:, None], own, packed.drafts),
            trees=trees,
        )


def _table(words: NDArray[np.int64], shape: StepShape) -> NDArray[np.int64]:
    """Return the rows in a host buffer, as `rows_of` does of the input buffer."""
    width = Word.TOKENS + shape.query_len
    return words[: shape.num_rows * width].reshape(shape.num_rows, width)


def rows_of(words: Tensor, shape: StepShape) -> Tensor:
    """Return the rows in the input buffer, [num_rows, Word.TOKENS + Q]."""
    width = Word.TOKENS + shape.query_len
    return words[: shape.num_rows * width].view(shape.num_rows, width)


def adapters_of(table: Tensor, shape: StepShape) -> Tensor:
    """Return the places of the adapters of all tokens, [num_rows * Q] int32.

    table: as in Packed.
    """
    of_rows = table[:, Word.ADAPTER].to(torch.int32)
    return of_rows[:, None].expand(-1, shape.query_len).flatten()
