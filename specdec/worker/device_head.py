"""Drafts of a head on the device, behind the tokens that a step has verified there.

A head with KV runs the pairs of the new tokens, whose features are those of the step's own pass,
and then one pass for each draft token. The pair of the token in front of the new ones is run again:
its slot may be in a block that the sequence has given back, since the target had not written it.
Tokens, positions and the number of tokens stay on the device: the next step takes them there, and
the host receives them with the result of this one.
Behind a step with prompts the head also runs their tokens, in one pass like that of the target.
The drafts are those of `head_runner`, which serves all other steps on the same features and KV.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.device_batch import DeviceBatch, RaggedBatch
from specdec.kernels.forward_batch import HiddenStates
from specdec.kernels.logit_edits import LogitEdits
from specdec.models.heads.base import DeviceHead
from specdec.sampling.device_sampler import SamplingKind, VerifiedChains
from specdec.worker.device_rules import PARAM_WORDS, rules_of
from specdec.worker.device_state import DeviceState, DeviceStepLimits, slots_at
from specdec.worker.head_sampler import HeadSampler, Shaping
from specdec.worker.step_graphs import StepShape


class DrafterParts(NamedTuple):
    """A rank's head, and what it shares with the drafts that the host makes.

    features: [num_slots, feature_size] of the target's tokens in its pool; kv_cache: of the pairs.
    Both have a padding block behind the pool.
    """

    head: DeviceHead
    sampler: HeadSampler
    features: Tensor
    kv_cache: Tensor


class DraftRows(NamedTuple):
    """The rows behind which a head drafts, as the host has packed them.

    params: records of SAMPLE_PARAMS. num_prompt: tokens of the prompt. num_wanted: draft tokens.
    """

    params: Tensor  # [num_rows, PARAM_WORDS] int64
    places: Tensor  # [num_rows] int64, like the next two
    num_prompt: Tensor
    num_wanted: Tensor


class HeadDrafts:
    """Launches the passes of a head on static buffers, stage by stage.

    `add_features` follows each pass of the target. Behind that of a step with prompts come
    `run_prompts`, if the head runs one, and `gather`. Where some row wants a draft, `run_pairs`
    follows the verification; then come `select` and `advance` in turn, once for each token, and
    `advance` not behind the last one.
    """

    def __init__(
        self,
        parts: DrafterParts,
        state: DeviceState,
        limits: DeviceStepLimits,
        hidden_size: int,
        drafts: Tensor,
    ) -> None:
        """hidden_size: of the target. drafts: [max_num_seqs, 1 + max_draft_tokens] int64.

        A row of `drafts` receives the number of its draft tokens, then the tokens.
        """
        self.parts, self._state, self._limits, self._drafts = parts, state, limits, drafts
        page, num_rows = parts.features, limits.max_num_seqs
        num_tokens = max(num_rows * limits.max_query_len, limits.max_step_tokens)
        device = page.device
        ids = partial(torch.zeros, dtype=torch.int64, device=device)
        self._tapped = page.new_zeros(num_tokens, len(parts.head.taps), hidden_size)
        self._slots = ids(num_tokens)
        self._features = page.new_zeros(num_tokens, page.shape[1])
        self._first = ids(num_rows)  # the last known token in front of the step
        self._rows = DraftRows(
            ids(num_rows, PARAM_WORDS),
            ids(num_rows) + state.padding_place,
            ids(num_rows),
            ids(num_rows),
        )
        self._ends = ids(num_rows) + 1  # lengths in front of the drafts
        self._outputs = page.new_zeros(num_rows, page.shape[1])  # of the last pass
        self._tokens = ids(num_rows)  # drafted last
        self._index = ids(1)  # number of tokens that each row has, or had ended at
        self._offsets = torch.arange(1 + limits.max_query_len, device=device)

    @property
    def taps(self) -> tuple[int, ...]:
        """See DraftHead."""
        return self.parts.head.taps

    def keep(self, states: HiddenStates, slots: Tensor) -> None:
        """Keep what the head reads of a pass of the target. slots: [T], of its tokens."""
        self._slots[: len(slots)] = slots
        self._tapped[: len(states.tapped)] = states.tapped

    def keep_first(self, first: Tensor) -> None:
        """Keep the last known token of each row, [num_rows]."""
        self._first[: len(first)] = first

    def add_features(self, hidden: Tensor) -> None:
        """Compute the features of the tokens of the pass that was kept, and store them.

        hidden: [T, hidden_size], final and normed, of this pass.
        """
        num_tokens, head = len(hidden), self.parts.head
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
        is_pair = is_written & (batch.positions > 0)  # pair 0 does not exist
        padding_slot = self._limits.num_blocks * size
        pairs = replace(
            batch,
            positions=batch.positions.clamp_min(1),
            slot_mapping=batch.slot_mapping.masked_fill(~is_pair, padding_slot),
            context_lens=batch.context_lens.clamp_min(2),
        )
        self.parts.head.run_on_device(pairs, features, self.parts.kv_cache)

    def gather(self, index: Tensor) -> None:
        """Put the features of the tokens at `index` [N] first, as `run_pairs` reads them."""
        self._features[: len(index)] = self._features[index]

    def run_pairs(self, rows: DraftRows, verified: VerifiedChains, shape: StepShape) -> None:
        """Run the pairs of the new tokens, and of that before, of the rows that want a draft.

        The state has the lengths with these tokens.
        """
        own = self._own_rows(shape.num_rows)
        ends, counts = self._state.num_tokens[rows.places], verified.counts
        most = self._limits.max_model_len - 1 - ends  # a token of the target fits behind
        wants = (rows.num_wanted > 0) & (counts > 0)
        num_wanted = torch.minimum(rows.num_wanted, most).clamp_min(0) * wants
        for mine, given in zip(own, (*rows[:3], num_wanted), strict=True):
            mine.copy_(given)
        self._ends[: shape.num_rows] = ends
        self._drafts[: shape.num_rows, 0] = 0
        self._index.zero_()
        offsets, last = self._offsets[: shape.query_len + 1], counts[:, None]
        starts = (ends - counts - 1)[:, None]
        positions = starts + torch.minimum(offsets, last)
        first = self._first[: shape.num_rows, None]
        tokens = torch.cat([first, verified.token_ids], 1).masked_fill(offsets > last, 0)
        is_written = (offsets <= last) & wants[:, None] & (positions > 0)  # pair 0 does not exist
        batch = self._batch(tokens, positions.clamp_min(1), is_written, shape)
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
            shape.num_rows, -1, before.shape[2]
        )
        return torch.cat([before, own], 1).flatten(0, 1)

    def select(self, kind: SamplingKind, shape: StepShape, edits: LogitEdits | None = None) -> None:
        """Select the next token of each row that goes on; the held drafts are those so far.

        A draft ends where the head's logits are not numbers. edits: of the target's logits behind
        the draft, one row for each sequence.
        """
        rows, drafts = self._own_rows(shape.num_rows), self._drafts[: shape.num_rows]
        logits = self.parts.head.output_logits(self._outputs[: shape.num_rows])
        before = self._ends[: shape.num_rows] + self._index - 1
        rules = None
        if kind is not SamplingKind.GREEDY:
            rules = rules_of(rows.params, before[:, None], rows.num_prompt)
        if edits is None:
            sample = self.parts.sampler.select_on_device(logits, rules, kind)
        else:
            is_drafted = self._offsets[: drafts.shape[1] - 1] < self._index
            paths = drafts[:, 1:].masked_fill(~is_drafted, -1)[edits.rows]
            shaping = Shaping(edits, paths, before + 1 - rows.num_prompt)
            sample = self.parts.sampler.select_shaped(logits, rules, kind, shaping)
        goes_on = self._goes_on(shape.num_rows) & ~sample.is_invalid
        tokens = sample.token_ids.masked_fill(~goes_on, 0)
        column = (self._index + 1).clamp_max(drafts.shape[1] - 1)  # in a capture it may be behind
        drafts.index_copy_(1, column, tokens[:, None])
        drafts[:, 0] += goes_on
        self._state.held_drafts.index_copy_(0, rows.places, drafts)
        self._tokens[: shape.num_rows] = tokens
        self._index += 1

    def advance(self, shape: StepShape) -> None:
        """Run the tokens that were drafted last. shape: of a step with one token of each row."""
        num_rows, parts = shape.num_rows, self.parts
        positions = self._ends[:num_rows] + self._index - 1
        is_written = self._goes_on(num_rows)[:, None]
        tokens = self._tokens[:num_rows, None]
        batch = self._batch(tokens, positions[:, None], is_written, shape)
        features = parts.head.next_features(self._outputs[:num_rows])
        self._outputs[:num_rows] = parts.head.run_on_device(batch, features, parts.kv_cache)

    def _own_rows(self, num_rows: int) -> DraftRows:
        return DraftRows(*(each[:num_rows] for each in self._rows))

    def _goes_on(self, num_rows: int) -> Tensor:
        """Return the rows that have a token at each place so far, and want another."""
        num_drafts = self._drafts[:num_rows, 0]
        return (num_drafts == self._index) & (num_drafts < self._rows.num_wanted[:num_rows])

    def _batch(
        self, token_ids: Tensor, positions: Tensor, is_written: Tensor, shape: StepShape
    ) -> DeviceBatch:
        """Return the input of a pass; all [num_rows, Q]. is_written: tokens whose KV is stored."""
        size = self._limits.block_size
        positions = positions.clamp_max(shape.num_blocks * size - 1)  # of rows that have ended
        tables = self._state.tables[self._rows.places[: shape.num_rows], : shape.num_blocks]
        slots = slots_at(positions, tables, size)
        return DeviceBatch(
            input_ids=token_ids.flatten(),
            positions=positions.flatten(),
            slot_mapping=slots.masked_fill(~is_written, self._limits.num_blocks * size).flatten(),
            block_tables=tables,
            context_lens=positions[:, -1] + 1,
            query_len=token_ids.shape[1],
        )
