"""Steps on the device whose rows have different lengths: one pass over the tokens of all.

Some row has a chunk of a prompt, or the numbers of draft tokens differ by more than padding costs.
Prompts, decodes and drafts stand one after the other, without padding between them. Around the
pass a few operators, which are launched one by one, spread the packed rows over their tokens, and
gather the hidden states of the last known tokens and the drafts into the shape of a step of equal
rows. So sampling, verification and their graphs are those of every step.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.kernels.reference.device_batch import RaggedBatch, TreeNodes
from specdec.kernels.reference.device_states import StateRows
from specdec.worker.device.decoder import DeviceDecoder
from specdec.worker.device.head.block import BlockDrafts
from specdec.worker.device.head.pairs import PairDrafts
from specdec.worker.device.input.input import Packed, Word
from specdec.worker.device.input.tree_input import PackedTrees
from specdec.worker.device.state import DeviceState, DeviceStepLimits
from specdec.worker.device.step_graphs import RaggedShape
from specdec.worker.device.trees import first_nodes_of


class RaggedPass:
    """Static buffers of a pass over the tokens of all rows, and the operators around it.

    `spread`, then `run`, which may be a graph, then `run_head` with a head, `gather` and
    `mark_invalid_chunks`.
    """

    def __init__(
        self,
        model: DeviceDecoder,
        kv_cache: Tensor,
        state: DeviceState,
        limits: DeviceStepLimits,
        drafts: PairDrafts | BlockDrafts | None = None,
    ) -> None:
        """Allocate for `limits.max_step_tokens`; before the first `spread` all is padding.

        drafts: of a head with KV after the steps, which reads the pass.
        """
        device, num_tokens = kv_cache.device, limits.max_step_tokens
        ids = partial(torch.zeros, dtype=torch.int64, device=device)
        self._model, self._kv_cache, self._state, self._limits = model, kv_cache, state, limits
        self._drafts = drafts
        self._input_ids, self._positions, self._rows = (ids(num_tokens) for _ in range(3))
        self._adapters = ids(num_tokens).to(torch.int32)
        self._slots = ids(num_tokens) + limits.padding_slot
        self._bounds = ids(limits.max_num_seqs + 1).to(torch.int32)
        self._context_lens = ids(limits.max_num_seqs) + 1
        self._tables = ids(limits.max_num_seqs, limits.blocks_of_longest) + limits.num_blocks
        num_nodes = limits.max_query_len - 1 if limits.max_tree_nodes else 0
        self._words = ids(num_tokens if num_nodes else 0)
        self._first_nodes = ids(limits.max_num_seqs)
        self._node_positions = ids(limits.max_num_seqs, num_nodes)
        self._state_rows = StateRows(*(ids(limits.max_num_seqs) for _ in StateRows._fields))
        self._state_rows.slots.fill_(limits.max_num_seqs)
        self._index = torch.arange(num_tokens, device=device)
        size = (num_tokens, model.hidden_size)
        self._hidden = torch.zeros(size, dtype=model.dtype, device=device)

    @torch.inference_mode()
    def spread(self, packed: Packed, flat_ids: Tensor, shape: RaggedShape) -> None:
        """Write the tokens of the rows to the buffers, with padding up to `shape`.

        flat_ids: [shape.num_tokens] int64, tokens of all rows as the host knows them.
        """
        num_rows, index = len(packed.places), self._index[: shape.num_tokens]
        ends = packed.table[:, Word.END].contiguous()
        rows = torch.searchsorted(ends, index, right=True).clamp_max_(num_rows - 1)
        offsets = index - self._last_known(packed)[rows]  # to the last known token
        num_drafts, starts = packed.num_drafts[rows], packed.starts[rows]
        behind = torch.cat([packed.first[:, None], packed.drafts], 1)
        columns = offsets.clamp(0, behind.shape[1] - 1)
        own = behind[rows, columns]
        indices = starts + torch.minimum(offsets, num_drafts)
        size, tables = self._limits.block_size, self._state.tables
        slots = tables[packed.places[rows], indices // size] * size + indices % size
        self._rows[: shape.num_tokens] = rows
        self._input_ids[: shape.num_tokens] = torch.where(offsets < 0, flat_ids, own)
        self._positions[: shape.num_tokens] = indices
        if packed.trees is not None:
            self._spread_trees(packed, packed.trees, rows, columns)
        self._slots[: shape.num_tokens] = slots.masked_fill(
            offsets > num_drafts, self._limits.padding_slot
        )
        if shape.has_adapters:
            self._adapters[: shape.num_tokens] = packed.table[rows, Word.ADAPTER]
        self._bounds[1 : num_rows + 1] = ends
        self._bounds[num_rows + 1 :] = ends[-1]
        self._context_lens[:num_rows] = packed.starts + 1 + packed.num_drafts
        self._tables[:num_rows, : shape.num_blocks] = tables[packed.places, : shape.num_blocks]
        if self._limits.has_states:
            self._spread_states(packed, ends)

    def _spread_states(self, packed: Packed, ends: Tensor) -> None:
        """Write the rows of recurrent layers, without drafts that a row turns out not to have."""
        rows, num_drafts, num_rows = self._state_rows, packed.num_drafts, len(ends)
        firsts = pad(ends, (1, -1))
        most = ends - firsts
        num_tokens = most - packed.table[:, Word.NUM_DRAFTS] + num_drafts
        starts = packed.starts - (num_tokens - num_drafts - 1).clamp_min(0)
        found = (packed.table[:, Word.STATE_SLOT], firsts, num_tokens, starts, num_drafts)
        for whole, own in zip(rows, found, strict=True):
            whole[:num_rows] = own
        rows.slots[num_rows:] = self._limits.max_num_seqs
        rows.num_tokens[num_rows:] = 0

    def _spread_trees(
        self, packed: Packed, trees: PackedTrees, rows: Tensor, columns: Tensor
    ) -> None:
        """Write positions and words of the tokens of a step with trees, over those of chains.

        rows, columns: [T], of each token in the tensors of `trees`; tokens before the last
        known one have its column.
        """
        own = self._positions[: len(rows)]
        is_node = columns > 0
        depths = torch.minimum(trees.depths[rows, columns], packed.num_drafts[rows])
        own.copy_(torch.where(is_node, packed.starts[rows] + depths, own))
        self._words[: len(rows)] = trees.words[rows, columns]
        num_rows, num_nodes = trees.parents.shape
        self._first_nodes[:num_rows] = first_nodes_of(packed)
        self._node_positions[:num_rows, :num_nodes] = packed.starts[:, None] + torch.minimum(
            trees.depths[:, 1:], packed.num_drafts[:, None]
        )

    @torch.inference_mode()
    def run(self, shape: RaggedShape) -> None:
        """Launch the model on the buffers; its output is in the hidden buffer."""
        batch = self._batch(shape)
        if self._drafts is None:
            hidden = self._model.forward_on_device(batch, self._kv_cache)
        else:
            states = self._model.tapped_on_device(batch, self._kv_cache, self._drafts.taps)
            self._drafts.keep(states, batch.slot_mapping)
            hidden = states.final
        self._hidden[: shape.num_tokens] = hidden

    def states(self, num_tokens: int) -> Tensor:
        """Return a copy of the hidden states of the first tokens."""
        return self._hidden[:num_tokens].clone()

    @torch.inference_mode()
    def run_head(self, packed: Packed, shape: RaggedShape, *, has_prompts: bool) -> None:
        """Compute what a head reads of the pass, and with `has_prompts` run its pairs of prompts.

        Those of decodes, and of the last known token of a row that samples, run after the
        verification.
        """
        assert self._drafts is not None
        self._drafts.keep_first(packed.first)
        self._drafts.add_features(self._hidden[: shape.num_tokens])
        if not has_prompts:
            return
        table, rows = packed.table, self._rows[: shape.num_tokens]
        index = self._index[: shape.num_tokens]
        ends = self._last_known(packed) + 1 - table[:, Word.SAMPLES]
        is_written = (index < ends[rows]) & (table[:, Word.HAS_HEAD] > 0)[rows]
        self._drafts.run_prompts(self._batch(shape), is_written)

    @torch.inference_mode()
    def gather(self, packed: Packed, offsets: Tensor, hidden: Tensor) -> None:
        """Copy the hidden states of the last known tokens and the drafts to `hidden`.

        offsets: [Q], from 0 on. hidden: [num_rows * Q, hidden_size].
        """
        num_drafts = packed.table[:, Word.NUM_DRAFTS][:, None]
        index = self._last_known(packed)[:, None] + torch.minimum(offsets, num_drafts)
        index = index.clamp_min(0).flatten()
        torch.index_select(self._hidden, 0, index, out=hidden)
        if self._drafts is not None:
            self._drafts.gather(index)

    @torch.inference_mode()
    def mark_invalid_chunks(self, table: Tensor, counts: Tensor, shape: RaggedShape) -> None:
        """Set the counts [num_rows] of rows that do not sample: 1, or 0 for NaN or Inf.

        Their KV is invalid too, and must not be shared with other requests. table: as in Packed.
        """
        num_tokens = shape.num_tokens
        is_finite = self._hidden[:num_tokens].isfinite().all(1)
        is_token = self._index[:num_tokens] < table[-1, Word.END]
        num_faults = torch.zeros_like(counts).index_add_(
            0, self._rows[:num_tokens], (is_token & ~is_finite).long()
        )
        samples = table[:, Word.SAMPLES] > 0
        counts.copy_(torch.where(samples, counts, (num_faults == 0).long()))

    def _batch(self, shape: RaggedShape) -> RaggedBatch:
        tokens, rows = slice(shape.num_tokens), slice(shape.num_rows)
        return RaggedBatch(
            input_ids=self._input_ids[tokens],
            positions=self._positions[tokens],
            slot_mapping=self._slots[tokens],
            rows=self._rows[tokens],
            cu_seqlens=self._bounds[: shape.num_rows + 1],
            block_tables=self._tables[rows, : shape.num_blocks],
            context_lens=self._context_lens[rows],
            decode_len=self._limits.max_query_len,
            adapters=self._adapters[tokens] if shape.has_adapters else None,
            trees=self._trees(shape) if shape.has_trees else None,
            states=self._state_rows.first(shape.num_rows) if self._limits.has_states else None,
        )

    def _trees(self, shape: RaggedShape) -> TreeNodes:
        return TreeNodes(
            self._words[: shape.num_tokens],
            self._first_nodes[: shape.num_rows],
            self._node_positions[: shape.num_rows],
        )

    @staticmethod
    def _last_known(packed: Packed) -> Tensor:
        """Return the index of the last known token of each row among all tokens, [num_rows]."""
        return packed.table[:, Word.END] - 1 - packed.table[:, Word.NUM_DRAFTS]
