"""Steps of prompts, decodes and drafts that run on the device between two copies.

The host packs what it knows about a step into one buffer, which is copied to the device. From it
the device reads the tokens, positions and sampling rules; the block tables, and the last token and
length of each sequence, stay there. It runs the model, samples and verifies, and one copy returns
the tokens. No value is read by the host between, so that a step can be a graph, and can begin
before the one before it has ended.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.config.gpu.graph_sizes import most_padding_tokens
from specdec.sampling.vocab_shard import VocabShard
from specdec.types.messages import BlockTableDelta, StepRow
from specdec.worker.batch.batch_state import SequenceState
from specdec.worker.device.decoder import DeviceDecoder
from specdec.worker.device.extras import ExtrasPacker
from specdec.worker.device.input import rows as device_rows
from specdec.worker.device.input.buffers import HostBuffer, PendingTokens, recorded_event
from specdec.worker.device.input.columns import StepColumns
from specdec.worker.device.input.input import StepPacker
from specdec.worker.device.launch import StepLauncher
from specdec.worker.device.plan import StepPlan
from specdec.worker.device.state import DeviceState, DeviceStepLimits
from specdec.worker.device.step_graphs import GraphReport, RaggedShape, StepGraphs, StepShape
from specdec.worker.head.parts import DrafterParts

MAX_IN_FLIGHT = 2


class DeviceSteps:
    """Runs the steps of a rank on the device, with the state of their sequences there."""

    def __init__(
        self,
        model: DeviceDecoder,
        kv_cache: Tensor,
        shard: VocabShard,
        limits: DeviceStepLimits,
        graphs: StepGraphs,
        num_in_flight: int = MAX_IN_FLIGHT,
        drafter: DrafterParts | None = None,
    ) -> None:
        """kv_cache: with a block after the `limits.num_blocks` of the pool.

        num_in_flight: most steps that are begun and not collected. drafter: drafts after the
        steps.
        """
        device = kv_cache.device
        assert kv_cache.shape[1] == (limits.num_blocks + 1) * limits.block_size, "no padding block"
        self._model, self._limits, self._graphs = model, limits, graphs
        self._device = device
        self._state = state = DeviceState(limits, device)
        self._packer = StepPacker(
            limits, state, model.adapter_places, holds_drafts=drafter is not None
        )
        self._extras = ExtrasPacker(state, device)
        self._launcher = StepLauncher(
            model, kv_cache, shard, limits, state, graphs, self._packer, drafter
        )
        self._buffers = [HostBuffer(self._launcher.buffers) for _ in range(num_in_flight)]
        self._num_begun = 0
        self._most_next_drafts = 0 if drafter is None else limits.max_draft_tokens
        self._last_plan: StepPlan | None = None
        self._most_padding = most_padding_tokens(model.hidden_size)

    def capture(self) -> GraphReport:
        """Capture the graphs, with rows of padding; call it before the first step."""
        return self._launcher.capture(self._fill_with_padding)

    def close(self) -> None:
        """Destroy the graphs; no step may be in flight."""
        self._graphs.close()

    def replace_drafter(self, drafter: DrafterParts) -> None:
        """Draft with another head of the same sizes; the graphs of its passes are captured again.

        Steps may be in flight.
        """
        self._launcher.replace_drafter(drafter, self._fill_with_padding)

    def update(self, released: Sequence[int], deltas: Sequence[BlockTableDelta]) -> None:
        """Apply the releases and block table deltas of a step; admissions need none."""
        self._state.update(released, deltas)
        self._extras.forget(released)

    def forget_tokens(self, rows: Sequence[StepRow]) -> None:
        """Count the tokens of sequences again, whose rows the host runs."""
        self._extras.forget(row.seq_id for row in rows)

    def can_run(self, columns: StepColumns, states: Sequence[SequenceState]) -> bool:
        """Return whether the device can run a step of one row or more without the host."""
        return (
            len(columns) <= self._limits.max_num_seqs
            and self._fits_device(columns, states)
            and self._fits_scored(columns)
            and self._can_draft(columns)
            and (not self._is_ragged(columns) or self._fits_ragged(columns, states))
            and all(map(self._state.has_place, columns["seq_id"]))
        )

    def _can_draft(self, columns: StepColumns) -> bool:
        """Return whether the drafts after rows can be made on the device, up to some size."""
        if not columns.grows_trees:
            return max(columns.num_next_drafts) <= self._most_next_drafts
        has_room = self._shape(columns, 0).num_rows <= self._limits.max_growing_rows
        return has_room and all(
            self._launcher.holds_tree(row.drafting.num_next, row.drafting.next_depth)
            for row in columns.rows
            if row.samples
        )

    def states_of(self, rows: Sequence[StepRow]) -> Tensor:
        """Return the hidden states of the last step, whose rows are known by now."""
        assert self._last_plan is not None, "no step has run"
        return self._launcher.states_of(self._last_plan, [len(row.token_ids) for row in rows])

    def hidden_of(self, rows: Sequence[StepRow], seq_ids: Container[int]) -> Tensor:
        """Return the hidden states that the host verifies some rows of the last step by.

        They are those of the last known token and the drafts of each row.
        """
        assert self._last_plan is not None, "no step has run"
        lengths = [
            (index, 1 + row.num_draft_tokens)
            for index, row in enumerate(rows)
            if row.seq_id in seq_ids
        ]
        return self._launcher.hidden_of(self._last_plan, lengths)

    def _fits_device(self, columns: StepColumns, states: Sequence[SequenceState]) -> bool:
        """Return whether no row needs the host."""
        takes_adapters = self._model.adapter_places is not None
        if any(columns["num_lookahead_tokens"]) or (columns.has_adapters and not takes_adapters):
            return False
        return all(
            device_rows.fits_device(row, state)
            for row, state in zip(columns.rows, states, strict=True)
            if state.needs_checks
        )

    def _fits_scored(self, columns: StepColumns) -> bool:
        """Return whether there is room for the last known tokens and drafts, padding included."""
        shape, limits = self._shape(columns, 0), self._limits
        num_tokens = shape.num_rows * shape.query_len
        return shape.query_len <= limits.max_query_len and num_tokens <= limits.max_scored_tokens

    def _shape(self, columns: StepColumns, num_blocks: int) -> StepShape:
        """Return the shape of sampling, padded to that of a graph if there is one.

        A chain may be as long as a tree, where a proposer found no other continuation.
        """
        most = max(columns.num_drafts)
        has_trees = columns.has_trees or most > self._limits.max_draft_tokens
        return self._graphs.padded(StepShape(len(columns), 1 + most, num_blocks, has_trees))

    def _is_ragged(self, columns: StepColumns) -> bool:
        """Return whether rows have prompts, or would be padded by more than launches cost."""
        if columns.has_prompts:
            return True
        shape = self._shape(columns, 0)
        return shape.num_rows * shape.query_len - columns.num_tokens > self._most_padding

    def _fits_ragged(self, columns: StepColumns, states: Sequence[SequenceState]) -> bool:
        """Return whether one pass over the tokens of all rows is possible."""
        num_tokens = columns.num_tokens
        if not self._launcher.runs_ragged or num_tokens > self._limits.max_step_tokens:
            return False
        return self._model.fits_ragged(num_tokens, _num_blocks(states))

    def begin(
        self,
        columns: StepColumns,
        states: Sequence[SequenceState],
        num_kept: Sequence[int] | None = None,
    ) -> PendingTokens:
        """Begin a step that the device can run; does not wait for the device.

        A pending row continues the step before. num_kept: drafts of each row to accept whatever
        they are; None where the rules of the sequences decide. A row that does not sample yields
        one token without meaning, or none where its hidden states are invalid. Raises
        torch.OutOfMemoryError, and then the step may be run again.
        """
        try:
            return self._begin(columns, states, num_kept)
        except torch.OutOfMemoryError:
            self._state.forget_tables(columns["seq_id"])
            self.forget_tokens(columns.rows)
            raise

    def _begin(
        self,
        columns: StepColumns,
        states: Sequence[SequenceState],
        num_kept: Sequence[int] | None,
    ) -> PendingTokens:
        plan, launcher, rows = self._plan(columns, states), self._launcher, columns.rows
        shape, is_ragged = plan.shape, plan.ragged is not None
        self._last_plan = plan
        extras = self._extras.pack(rows, states, shape.query_len)
        num_kept = device_rows.num_kept(rows, states) if num_kept is None else num_kept
        host = self._buffers[self._num_begun % len(self._buffers)]
        self._num_begun += 1
        self._packer.pack(host.words, columns, states, shape, num_kept, is_ragged=is_ragged)
        host.send(plan.num_words)
        table = launcher.launch(plan._replace(extras=extras))
        results, drafts = host.receive(shape, len(rows))
        logprobs = None
        if extras is not None and table is not None:
            logprobs = extras.pending_logprobs(table)
        return PendingTokens(
            results,
            drafts if plan.num_next else None,
            recorded_event(self._device),
            logprobs,
            launcher.buffers.layout,
            plan.grows_trees,
        )

    def _plan(self, columns: StepColumns, states: Sequence[SequenceState]) -> StepPlan:
        kind = max([state.sampling_kind for state in states])
        shape = self._shape(columns, _num_blocks(states))
        plan = StepPlan(
            shape,
            kind,
            max(columns.num_next_drafts),
            has_adapters=columns.has_adapters,
            grows_trees=columns.grows_trees,
        )
        if not self._is_ragged(columns):
            return plan
        sizes = (columns.num_tokens, shape.num_rows, shape.num_blocks)
        ragged = RaggedShape(*sizes, plan.has_adapters, shape.has_trees)
        return plan._replace(
            ragged=self._graphs.padded_ragged(ragged),
            has_chunks=not all(columns["samples"]),
            has_head_prompts=columns.has_head_prompts,
        )

    def _fill_with_padding(self, shape: StepShape) -> None:
        """Put a step of padding alone into the input buffer."""
        static = self._launcher.buffers.input
        words = np.zeros(len(static), np.int64)
        self._packer.pack_padding(words, shape)
        static.copy_(torch.from_numpy(words))


def _num_blocks(states: Sequence[SequenceState]) -> int:
    """Return the width of the block tables of sequences."""
    return max([len(state.block_table) for state in states])
