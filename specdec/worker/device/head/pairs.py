"""Drafts on the device of a head with KV, which runs the pairs of tokens (`heads.networks.base`).

It runs the pairs of the new tokens, whose features are those of the step's own pass. The pair of
the token before the new ones is run again: its slot may be in a block that the sequence has
given back, since the target had not written it. After a step with prompts the head also runs their
tokens, in one pass like that of the target. Then `PairDrafts` runs one pass for each draft token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from specdec.kernels.reference.device_batch import DeviceBatch, RaggedBatch
from specdec.kernels.reference.forward_batch import HiddenStates
from specdec.kernels.reference.logit_edits import LogitEdits
from specdec.models.heads.networks.base import first_slot
from specdec.sampling.device.device_sampler import SamplingKind
from specdec.sampling.device.device_trees import VerifiedChains
from specdec.worker.device.head.head import DraftRows, HeadDrafts, StepParts
from specdec.worker.device.state import slots_at
from specdec.worker.device.step_graphs import StepShape
from specdec.worker.head.parts import KvParts, PairParts

Parts = TypeVar("Parts", bound=KvParts)


class KvDrafts(HeadDrafts[Parts]):
    """Launches the passes over pairs on static buffers, stage by stage.

    `add_features` follows each pass of the target. After that of a step with prompts come
    `run_prompts`, if the head runs one, and `gather`. Where some row wants a draft, `run_pairs`
    follows the verification.
    """

    def __init__(self, parts: Parts, step: StepParts) -> None:
        super().__init__(parts, step)
        limits, slots, hidden_size = step.limits, self._tokens, step.buffers.hidden.shape[1]
        page, num_rows = parts.features, limits.max_num_seqs
        num_tokens = max(limits.max_scored_tokens, limits.max_step_tokens)
        self._tapped = page.new_zeros(num_tokens, len(parts.head.taps), hidden_size)
        self._slots = slots.new_full((num_tokens,), limits.padding_slot)
        self._features = page.new_zeros(num_tokens, page.shape[1])
        self._first = slots.new_zeros(num_rows)  # the last known token before the step
        self._outputs = page.new_zeros(num_rows, parts.head.output_size)  # of the last pass

    @property
    def taps(self) -> tuple[int, ...]:
        """See DraftHead."""
        return self.parts.head.taps

    def keep(self, states: HiddenStates, slots: Tensor) -> None:
        """Keep what the head reads of a pass of the target. slots: [T], of its tokens."""
        self._slots[: len(slots)] = slots
        self._tapped[: len(states.tapped)] = states.tapped

    def forget_pass(self) -> None:
        """Store no feature of the passes that were kept: captures run without one before them."""
        self._slots.fill_(self._limits.padding_slot)

    def keep_first(self, first: Tensor) -> None:
        """Keep the last known token of each row, [num_rows]."""
        self._first[: len(first)] = first

    def add_features(self, hidden: Tensor) -> None:
        """Compute the features of the tokens of the pass that was kept, and store them.

        hidden: [T, hidden_size], final and normed, of this pass.
        """
        num_tokens, head = len(hidden), self.parts.head
        if not head.feature_size:
            return
        features = head.features(self._tapped[:num_tokens] if head.taps else hidden)
        self._features[:num_tokens] = features
        page, slots = self.parts.features, self._slots[:num_tokens]
        page.index_copy_(0, slots, self._features[:num_tokens])

    def run_prompts(self, batch: RaggedBatch, is_written: Tensor) -> None:
        """Run the pairs of tokens of the pass that was kept. is_written: [T], whose KV is stored.

        The features are those of the tokens before them, of which the first of a row is not here.
        """
        num_tokens, size = len(batch.input_ids), self._limits.block_size
        before = (batch.positions - 1).clamp_min(0)
        slots = batch.block_tables[batch.rows, before // size] * size + before % size
        index = torch.arange(num_tokens, device=slots.device)
        is_first = index == batch.cu_seqlens[batch.rows]
        own = self._features[(index - 1).clamp_min(0)]
        features = torch.where(is_first[:, None], self.parts.features[slots], own)
        first = first_slot(self.parts.head)
        is_pair = is_written & (batch.positions >= first)
        pairs = replace(
            batch,
            positions=batch.positions.clamp_min(first),
            slot_mapping=batch.slot_mapping.masked_fill(~is_pair, self._limits.padding_slot),
            context_lens=batch.context_lens.clamp_min(first + 1),
            trees=None,  # their nodes are no prompt
        )
        self.parts.head.run_on_device(pairs, features, self.parts.kv_cache)

    def gather(self, index: Tensor) -> None:
        """Put the features of the tokens at `index` [N] first, as `run_pairs` reads them."""
        self._features[: len(index)] = self._features[index]

    def run_pairs(self, rows: DraftRows, verified: VerifiedChains, shape: StepShape) -> None:
        """Run the pairs of the new tokens, and of that before, of the rows that want a draft.

        The state has the lengths with these tokens.
        """
        wants, counts = self._start(rows, verified, shape), verified.counts
        ends = self._ends[: shape.num_rows]
        offsets, last = self._offsets[: shape.query_len + 1], counts[:, None]
        starts = (ends - counts - 1)[:, None]
        positions = starts + torch.minimum(offsets, last)
        first = self._first[: shape.num_rows, None]
        tokens = torch.cat([first, verified.token_ids], 1).masked_fill(offsets > last, 0)
        first_pair = first_slot(self.parts.head)
        is_written = (offsets <= last) & wants[:, None] & (positions >= first_pair)
        batch = self._batch(tokens, positions.clamp_min(first_pair), is_written, shape)
        features = self._features_of_pairs(starts, batch.block_tables, shape)
        outputs = self.parts.head.run_on_device(batch, features, self.parts.kv_cache)
        outputs = outputs.view(shape.num_rows, shape.query_len + 1, -1)
        index = last[:, :, None].expand(-1, 1, outputs.shape[2])
        self._outputs[: shape.num_rows] = outputs.gather(1, index).squeeze(1)

    def _features_of_pairs(self, starts: Tensor, tables: Tensor, shape: StepShape) -> Tensor:
        """Return the features of the token before each in `run_pairs`, [num_rows * (1 + Q), F].

        starts: [num_rows, 1], the first token's position; the feature before it is stored.
        """
        slots = slots_at((starts - 1).clamp_min(0), tables, self._limits.block_size)
        before = self.parts.features[slots.flatten()].view(shape.num_rows, 1, -1)
        own = self._features[: shape.num_rows * shape.query_len].view(
            shape.num_rows, shape.query_len, before.shape[2]
        )
        return torch.cat([before, own], 1).flatten(0, 1)

    def _tables(self, shape: StepShape) -> Tensor:
        """Return the block tables of the rows, [num_rows, num_blocks]."""
        return self._state.tables[self._rows.places[: shape.num_rows], : shape.num_blocks]

    def _batch(
        self, token_ids: Tensor, positions: Tensor, is_written: Tensor, shape: StepShape
    ) -> DeviceBatch:
        """Return the input of a pass; all [num_rows, Q]. is_written: tokens whose KV is stored."""
        size, last = self._limits.block_size, shape.num_blocks * self._limits.block_size - 1
        is_written = is_written & (positions <= last)  # a row that has ended may be beyond it
        positions = positions.clamp_max(last)
        tables = self._tables(shape)
        slots = slots_at(positions, tables, size)
        return DeviceBatch(
            input_ids=token_ids.flatten(),
            positions=positions.flatten(),
            slot_mapping=slots.masked_fill(~is_written, self._limits.padding_slot).flatten(),
            block_tables=tables,
            context_lens=positions[:, -1] + 1,
            query_len=token_ids.shape[1],
        )


class PairDrafts(KvDrafts[PairParts]):
    """Drafts token by token after `run_pairs`.

    `select` and `advance` come in turn, once for each token, and `advance` not after the last one.
    """

    def select(self, kind: SamplingKind, shape: StepShape, edits: LogitEdits | None = None) -> None:
        """Select the next token of each row that goes on; edits: as in `_select`."""
        logits = self.parts.head.output_logits(self._outputs[: shape.num_rows])
        self._select(logits, kind, shape.num_rows, edits)

    def advance(self, shape: StepShape) -> None:
        """Run the tokens that were drafted last. shape: of a step with one token of each row."""
        num_rows, parts = shape.num_rows, self.parts
        positions = self._ends[:num_rows] + self._index - 1
        is_written = self._goes_on(num_rows)[:, None]
        tokens = self._tokens[:num_rows, None]
        batch = self._batch(tokens, positions[:, None], is_written, shape)
        features = parts.head.next_features(self._outputs[:num_rows])
        self._outputs[:num_rows] = parts.head.run_on_device(batch, features, parts.kv_cache)
