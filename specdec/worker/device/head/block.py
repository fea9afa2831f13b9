"""Drafts on the device of a head that makes all tokens in one pass: DFlash, DSpark and P-EAGLE.

The pass runs a block of tokens after the last pair. Blocks may be longer than drafts, and than the
room after a sequence, so the KV of a block goes to pages that no sequence has: each row of a step
has some after the pool. Only the page with the last pair is the sequence's own, whose slots after
that pair are free.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from specdec.config.engine import EngineConfig
from specdec.kernels.reference.device_batch import DeviceBatch
from specdec.models.heads.networks.base import DeviceBlockHead, DeviceDrafts, DraftHead
from specdec.sampling.device.device_trees import VerifiedChains
from specdec.worker.device.head.head import DraftRows, LaunchedDrafts, StepParts
from specdec.worker.device.head.pairs import KvDrafts
from specdec.worker.device.state import slots_at
from specdec.worker.device.step_graphs import StepShape
from specdec.worker.head.parts import BlockParts


def num_scratch_blocks(head: DraftHead, limits: EngineConfig) -> int:
    """Return the pages after the pool and its padding that a head needs for blocks."""
    if head.capabilities.on_device is not DeviceDrafts.BLOCKS:
        return 0
    num_tokens = 0 if limits.speculation is None else limits.speculation.max_chain_tokens
    pages = _pages_of_row(cast(DeviceBlockHead, head), num_tokens, limits.block_size)
    return limits.max_num_seqs * pages


def _pages_of_row(head: DeviceBlockHead, max_draft_tokens: int, block_size: int) -> int:
    """Return the pages that the block of one sequence takes at most, beside the last pair's."""
    return -(-head.block_len(max(1, max_draft_tokens)) // block_size)


class BlockDrafts(KvDrafts[BlockParts], LaunchedDrafts[BlockParts]):
    """Launches the pass over blocks: `run_block` after `run_pairs`, then `draft`."""

    def __init__(self, parts: BlockParts, step: StepParts) -> None:
        super().__init__(parts, step)
        limits = step.limits
        size = (limits.max_num_seqs, limits.max_draft_tokens, self._outputs.shape[1])
        self._block = self._outputs.new_zeros(size)  # outputs of the draft tokens
        count = _pages_of_row(parts.head, limits.max_draft_tokens, limits.block_size)
        first = limits.num_blocks + 1  # after the padding block
        blocks = torch.arange(limits.max_num_seqs * count, device=self._tokens.device)
        self._scratch = first + blocks.view(-1, count)  # [max_num_seqs, count]
        assert parts.kv_cache.shape[1] >= (first + blocks.numel()) * limits.block_size

    def run_pairs(self, rows: DraftRows, verified: VerifiedChains, shape: StepShape) -> None:
        """Run pairs as KvDrafts does, and take the last new token of each row."""
        super().run_pairs(rows, verified, shape)
        last = (verified.counts - 1).clamp_min(0)[:, None]
        self._tokens[: shape.num_rows] = verified.token_ids.gather(1, last).squeeze(1)

    def run_block(self, shape: StepShape) -> None:
        """Run the blocks of drafts of up to `shape.query_len` - 1 tokens."""
        head, outputs = self.parts.head, self._outputs[: shape.num_rows]
        count, anchors = self._num_of(shape), self._tokens[: shape.num_rows]
        batch = self._block_batch(head.block_tokens(anchors, count), shape)
        found = head.run_block(batch, outputs, self.parts.kv_cache)
        self._block[: shape.num_rows, :count] = found[:, :count]

    def _inputs(self, num_rows: int, count: int) -> Tensor:
        return self._block[:num_rows, :count]

    def _block_batch(self, token_ids: Tensor, shape: StepShape) -> DeviceBatch:
        """Return the input of a pass over blocks [num_rows, Q], after the last tokens."""
        num_rows, size = shape.num_rows, self._limits.block_size
        own = self._own_rows(num_rows)
        # A row that wants no draft may have its last token after its pages.
        ends = self._ends[:num_rows, None].clamp_max(shape.num_blocks * size)
        offsets = torch.arange(token_ids.shape[1], device=token_ids.device)
        positions = ends + offsets
        tables = self._tables_with_scratch(own.places, ends, shape)
        slots = slots_at(positions, tables, size)
        has_none = (own.num_wanted == 0)[:, None]
        return DeviceBatch(
            input_ids=token_ids.flatten(),
            positions=positions.flatten(),
            slot_mapping=slots.masked_fill(has_none, self._limits.padding_slot).flatten(),
            block_tables=tables,
            context_lens=positions[:, -1] + 1,
            query_len=token_ids.shape[1],
        )

    def _tables_with_scratch(self, places: Tensor, ends: Tensor, shape: StepShape) -> Tensor:
        """Return block tables whose pages after the last token are those of the row itself.

        ends: [num_rows, 1], lengths of the sequences.
        """
        scratch = self._scratch[: shape.num_rows]
        tables = self._state.tables[places, : shape.num_blocks]
        wide = torch.cat([tables, scratch], 1)
        last = (ends - 1) // self._limits.block_size
        behind = torch.arange(wide.shape[1], device=wide.device) - last - 1
        return torch.where(
            behind < 0, wide, scratch.gather(1, behind.clamp(0, scratch.shape[1] - 1))
        )
