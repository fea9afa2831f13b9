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

from specdec.sampling.vocab_shard import VocabShard
from specdec.types.messages import BlockTableDelta, StepRow
from specdec.worker.batch.batch_state import SequenceState
from specdec.worker.batch.verification import num_kept_of
from specdec.worker.device.decoder import DeviceDecoder
from specdec.worker.device.eligibility import StepEligibility
from specdec.worker.device.extras import ExtrasPacker
from specdec.worker.device.input.buffers import HostBuffer, PendingTokens, recorded_event
from specdec.worker.device.input.columns import StepColumns
from specdec.worker.device.input.input import StepPacker
from specdec.worker.device.launch import StepLauncher
from specdec.worker.device.plan import StepPlan, StepPlanner
from specdec.worker.device.state import DeviceState, DeviceStepLimits
from specdec.worker.device.step_graphs import GraphReport, StepGraphs, StepShape
from specdec.worker.head.parts import DrafterParts

MAX_IN_FLIGHT = 2


class DeviceSteps:
    """Runs the steps of a rank on the device, with the state of their sequences there.

    eligibility: specifies which steps it can run.
    """

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
        self._last_plan: StepPlan | None = None
        self._planner = StepPlanner(limits, graphs, model.hidden_size)
        max_next_drafts = 0 if drafter is None else limits.max_draft_tokens
        self.eligibility = StepEligibility(
            model, limits, state, self._planner, self._launcher, max_next_drafts
        )

    @property
    def has_states(self) -> bool:
        """Return whether steps change states of recurrent layers."""
        return self._limits.has_states

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
        if self._launcher.lookup is not None:
            self._launcher.lookup.forget(released)

    def forget_tokens(self, rows: Sequence[StepRow]) -> None:
        """Count and copy the tokens of sequences again, whose rows the host runs."""
        self._extras.forget(row.seq_id for row in rows)
        if self._launcher.lookup is not None:
            self._launcher.lookup.forget(row.seq_id for row in rows)

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
        torch.OutOfMemoryError; then the step may be run again, unless `has_states`.
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
        plan, launcher, rows = self._planner.plan(columns, states), self._launcher, columns.rows
        shape, is_ragged = plan.shape, plan.ragged is not None
        self._last_plan = plan
        extras = self._extras.pack(rows, states, shape.query_len)
        if launcher.lookup is not None:
            launcher.lookup.hold(rows, any_wants=plan.num_lookup > 0)
        num_kept = num_kept_of(rows, states) if num_kept is None else num_kept
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
            drafts if plan.drafts else None,
            recorded_event(self._device),
            logprobs,
            launcher.buffers.layout,
            plan.grows_trees,
            plan.num_lookup > 0,
        )

    def _fill_with_padding(self, shape: StepShape) -> None:
        """Put a step of padding alone into the input buffer."""
        static = self._launcher.buffers.input
        words = np.zeros(len(static), np.int64)
        self._packer.pack_padding(words, shape)
        static.copy_(torch.from_numpy(words))
