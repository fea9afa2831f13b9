"""Launches of a step on the device: the pass, sampling and verification, and a head's drafts.

Each reads and writes static buffers alone, so that a graph can hold it. `DeviceSteps` packs the
input of a step and receives its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from specdec.kernels.reference.device_batch import DeviceBatch
from specdec.kernels.reference.device_states import StateRows
from specdec.sampling.device.device_sampler import DeviceSample, SamplingKind
from specdec.sampling.device.device_trees import DeviceTrees, VerifiedChains
from specdec.sampling.sampler import sample_on_device
from specdec.sampling.vocab_shard import VocabShard
from specdec.worker.device.decoder import DeviceDecoder
from specdec.worker.device.extras import StepExtras
from specdec.worker.device.head.block import BlockDrafts
from specdec.worker.device.head.head import StepParts
from specdec.worker.device.head.head_launch import HeadLauncher, draft_layout
from specdec.worker.device.head.lookup import LookupLauncher
from specdec.worker.device.head.pairs import PairDrafts
from specdec.worker.device.input.buffers import StepBuffers
from specdec.worker.device.input.input import (
    Packed,
    StepPacker,
    Word,
    adapters_of,
    most_words,
    rows_of,
)
from specdec.worker.device.plan import StepPlan
from specdec.worker.device.ragged import RaggedPass
from specdec.worker.device.rules import rules_of
from specdec.worker.device.state import DeviceState, DeviceStepLimits, slots_at
from specdec.worker.device.step_graphs import (
    GraphReport,
    Launch,
    Part,
    RaggedShape,
    Stage,
    StepGraphs,
    StepShape,
    stages_of_kinds,
)
from specdec.worker.device.trees import TreePaths, nodes_of
from specdec.worker.head.parts import BlockParts, DrafterParts, PairParts


class StepLauncher:
    """Launches the steps whose input is in its buffers."""

    def __init__(
        self,
        model: DeviceDecoder,
        kv_cache: Tensor,
        shard: VocabShard,
        limits: DeviceStepLimits,
        state: DeviceState,
        graphs: StepGraphs,
        packer: StepPacker,
        drafter: DrafterParts | None = None,
    ) -> None:
        """Arguments as in DeviceSteps."""
        self._model, self._kv_cache, self._shard = model, kv_cache, shard
        self._limits, self._state, self._graphs, self._packer = limits, state, graphs, packer
        num_rows, num_tokens = limits.max_num_seqs, limits.max_scored_tokens
        device, layout = kv_cache.device, draft_layout(drafter, limits)
        ids = partial(torch.zeros, dtype=torch.int64, device=device)
        self.buffers = StepBuffers(
            input=ids(most_words(limits)),
            output=ids(num_rows * layout.width + num_rows + num_tokens),
            hidden=torch.zeros(num_tokens, model.hidden_size, dtype=model.dtype, device=device),
            layout=layout,
        )
        self._offsets = torch.arange(limits.max_query_len, device=device)
        self._stages = self._target_stages()
        head, lookup = drafter or DrafterParts()
        step = StepParts(self.buffers, state, limits, graphs)
        self._head = HeadLauncher(head, step, self._sources) if head else None
        self.lookup = LookupLauncher(lookup, step, shard.ops) if lookup else None
        for each in (self._head, self.lookup):
            self._stages |= {} if each is None else each.stages
        features = head.features if isinstance(head, PairParts | BlockParts) else None
        self._trees = TreePaths(state, limits, kv_cache, shard.ops, features)
        self._ragged: RaggedPass | None = None
        if limits.max_step_tokens:
            self._ragged = RaggedPass(model, kv_cache, state, limits, self._pairs)

    def _target_stages(self) -> dict[Stage, Launch]:
        stages: dict[Stage, Launch] = {
            Stage(Part.FORWARD): self.launch_forward,
            **stages_of_kinds(Part.SAMPLING, self._launch_plain),
        }
        if self._model.adapter_places is not None:
            adapted = partial(self.launch_forward, has_adapters=True)
            stages[Stage(Part.ADAPTED_FORWARD)] = adapted
        return stages

    @property
    def _pairs(self) -> PairDrafts | BlockDrafts | None:
        """Drafts of a head with KV, if there is one."""
        return None if self._head is None else self._head.pairs

    def holds_tree(self, num_nodes: int, depth: int) -> bool:
        """Return whether a head drafts trees of this size; depth: 0 for a chain beside trees."""
        return self._head is not None and self._head.holds_tree(num_nodes, depth)

    @property
    def runs_ragged(self) -> bool:
        """Return whether it launches steps with prompts."""
        return self._ragged is not None

    def capture(self, prepare: Launch) -> GraphReport:
        """Capture the graphs. prepare: fills the input with padding."""
        ragged = None if self._ragged is None else self._ragged.run
        return self._graphs.capture(self._stages, prepare, ragged)

    def replace_drafter(self, drafter: DrafterParts, prepare: Launch) -> None:
        """Draft with another head of the same sizes; capture the graphs of its passes again."""
        assert self._head is not None, "no head drafts"
        assert drafter.head is not None, "lookups have no versions"
        self._head.use(drafter.head)
        self._graphs.capture(self._head.stages, prepare)

    def launch(self, plan: StepPlan) -> Tensor | None:
        """Launch a step, and after it the draft tokens; return its table of log-probabilities.

        With `plan.extras` the operators of sampling and of the draft's selection are launched one
        by one, after the graph of the pass, while it runs.
        """
        shape, logprobs = plan.shape, None
        if plan.ragged is not None:
            self._launch_ragged(plan, plan.ragged)
        else:
            self._run(Stage(Part.ADAPTED_FORWARD if plan.has_adapters else Part.FORWARD), shape)
            if self._head is not None:
                self._head.launch_features(shape)
        if plan.extras is None:
            self._run(Stage(Part.SAMPLING, plan.kind), shape)
        else:
            logprobs = self.launch_sampling(plan.kind, shape, plan.extras)
        if plan.ragged is not None and plan.has_chunks:
            self._mark_invalid_chunks(shape, plan.ragged)
        if plan.num_next and self._head is not None:
            self._head.launch_drafts(plan)
        if plan.num_lookup and self.lookup is not None:
            self.lookup.launch(plan)
        return logprobs

    def _run(self, stage: Stage, shape: StepShape) -> None:
        self._graphs.run(stage, shape, self._stages[stage])

    @torch.inference_mode()
    def launch_forward(self, shape: StepShape, *, has_adapters: bool = False) -> None:
        """Launch the model on the step in the input buffer; its output is in the hidden buffer."""
        packed = self._unpack(shape)
        self._state.write_tables(packed.changes)
        batch = self._batch(packed, shape, has_adapters=has_adapters)
        if self._pairs is None:
            hidden = self._model.forward_on_device(batch, self._kv_cache)
        else:
            states = self._model.tapped_on_device(batch, self._kv_cache, self._pairs.taps)
            hidden = states.final
            self._pairs.keep(states, batch.slot_mapping)
            self._pairs.keep_first(packed.first)
        self.buffers.hidden[: len(hidden)] = hidden

    @torch.inference_mode()
    def _launch_ragged(self, plan: StepPlan, shape: RaggedShape) -> None:
        """Launch the model on the tokens of all rows; the output is that of `launch_forward`."""
        assert self._ragged is not None
        packed = self._unpack(plan.shape)
        self._state.write_tables(packed.changes)
        flat_ids = self.buffers.input[plan.num_words - shape.num_tokens : plan.num_words]
        self._ragged.spread(packed, flat_ids, shape)
        self._graphs.run_ragged(shape, self._ragged.run)
        if self._pairs is not None:
            self._ragged.run_head(packed, shape, has_prompts=plan.has_head_prompts)
        num_tokens = plan.shape.num_rows * plan.shape.query_len
        offsets = self._offsets[: plan.shape.query_len]
        self._ragged.gather(packed, offsets, self.buffers.hidden[:num_tokens])

    @torch.inference_mode()
    def _mark_invalid_chunks(self, shape: StepShape, ragged: RaggedShape) -> None:
        assert self._ragged is not None
        table = rows_of(self.buffers.input, shape)
        self._ragged.mark_invalid_chunks(table, self.buffers.results(shape)[:, 0], ragged)

    @torch.inference_mode()
    def launch_sampling(
        self, kind: SamplingKind, shape: StepShape, extras: StepExtras | None = None
    ) -> Tensor | None:
        """Launch sampling and verification; the result is in the output buffer.

        It is [num_rows, 1 + Q]: the number of new tokens, then the tokens. Returns the table of
        log-probabilities that `extras` requests, if any.
        """
        packed, num_tokens = self._unpack(shape), shape.num_rows * shape.query_len
        logits = self._model.compute_logits(self.buffers.hidden[:num_tokens])
        offsets, num_prompt = self._offsets[: shape.query_len], packed.table[:, Word.NUM_PROMPT]
        kept = None
        if extras is not None:
            kept = extras.logprob_logits(logits, shape.query_len) if extras.listed else None
            ends = (packed.positions(offsets) + 1 - num_prompt[:, None]).flatten()
            extras.edit(logits, packed.drafts_before(extras.edits.rows), ends, self._shard)
        rules = rules_of(kind, packed.params, packed.positions(offsets), num_prompt)
        sample = sample_on_device(logits, rules, self._shard)
        verified = self._verify(packed, sample)
        self._store(packed, verified, shape)
        if extras is None:
            return None
        extras.count(verified, self._shard)
        if kept is None:
            return None
        return extras.logprobs(kept, verified.token_ids, self._places(shape), self._shard)

    def _verify(self, packed: Packed, sample: DeviceSample) -> VerifiedChains:
        if packed.trees is not None:
            return self._trees.verify(packed, sample)
        drafts = DeviceTrees(packed.drafts, None, packed.num_drafts, packed.table[:, Word.NUM_KEPT])
        return self._shard.ops.verify_trees(sample, drafts).chains

    def _places(self, shape: StepShape) -> Tensor:
        """Return which of its row's sampled tokens each new token was, [num_rows, Q]."""
        if shape.has_trees:
            return self._trees.places(shape.num_rows, shape.query_len)
        return self._offsets[: shape.query_len].expand(shape.num_rows, -1)

    def _sources(self, shape: StepShape) -> Tensor:
        """Return the hidden state that each new token was sampled by, [num_rows, Q]."""
        rows = torch.arange(shape.num_rows, device=self._offsets.device)
        return rows[:, None] * shape.query_len + self._places(shape)

    def _launch_plain(self, kind: SamplingKind, shape: StepShape) -> None:
        self.launch_sampling(kind, shape)

    def _store(self, packed: Packed, verified: VerifiedChains, shape: StepShape) -> None:
        """Launch the copy of new tokens to the output buffer and to the state of the sequences."""
        (tokens, counts), state = verified, self._state
        last = tokens.gather(1, (counts - 1).clamp_min(0)[:, None]).squeeze(1)
        state.num_tokens.index_copy_(0, packed.places, packed.starts + 1 + counts)
        last_tokens = torch.where(counts > 0, last, packed.first)
        state.last_tokens.index_copy_(0, packed.places, last_tokens)
        if self.buffers.layout.width:
            state.held_drafts[:, 0].index_fill_(0, packed.places, 0)
            state.held_trees[:, 0].index_fill_(0, packed.places, 0)
        torch.cat([counts[:, None], tokens], 1, out=self.buffers.results(shape))

    @torch.inference_mode()
    def states_of(self, plan: StepPlan, lengths: Sequence[int]) -> Tensor:
        """Return the hidden states of the tokens of a step, for a head without KV on the host.

        lengths: tokens of each row, padding excluded. The result is a copy.
        """
        if plan.ragged is not None:
            assert self._ragged is not None
            return self._ragged.states(sum(lengths))
        return _of_rows(self.buffers.hidden, plan.shape.query_len, list(enumerate(lengths)))

    @torch.inference_mode()
    def hidden_of(self, plan: StepPlan, lengths: Sequence[tuple[int, int]]) -> Tensor:
        """Return the hidden states of the last known tokens and the drafts of some rows.

        lengths: the index of each row, and the number of these tokens. The result is a copy.
        """
        return _of_rows(self.buffers.hidden, plan.shape.query_len, lengths)

    def _unpack(self, shape: StepShape) -> Packed:
        return self._packer.unpack(self.buffers.input, shape)

    def _batch(self, packed: Packed, shape: StepShape, *, has_adapters: bool) -> DeviceBatch:
        offsets = self._offsets[: shape.query_len]
        indices = packed.indices(offsets)
        positions = packed.positions(offsets) if shape.has_trees else indices
        tables = self._state.tables[packed.places, : shape.num_blocks]
        slots = slots_at(indices, tables, self._limits.block_size)
        slots.masked_fill_(offsets > packed.num_drafts[:, None], self._limits.padding_slot)
        return DeviceBatch(
            input_ids=torch.cat([packed.first[:, None], packed.drafts], 1).flatten(),
            positions=positions.flatten(),
            slot_mapping=slots.flatten(),
            block_tables=tables,
            context_lens=packed.starts + 1 + packed.num_drafts,
            query_len=shape.query_len,
            adapters=adapters_of(packed.table, shape) if has_adapters else None,
            trees=nodes_of(packed, positions),
            states=self._state_rows(packed, shape) if self._limits.has_states else None,
        )

    def _state_rows(self, packed: Packed, shape: StepShape) -> StateRows:
        """Return the rows as recurrent layers run them: those of padding have no token."""
        slots = packed.table[:, Word.STATE_SLOT]
        firsts = torch.arange(shape.num_rows, device=slots.device) * shape.query_len
        num_tokens = (1 + packed.num_drafts) * (slots < self._limits.max_num_seqs)
        return StateRows(slots, firsts, num_tokens, packed.starts, packed.num_drafts)


def _of_rows(values: Tensor, query_len: int, lengths: Sequence[tuple[int, int]]) -> Tensor:
    """Return the first values of some rows, which have `query_len` each."""
    starts = ((row * query_len, length) for row, length in lengths)
    places = [start + offset for start, length in starts for offset in range(length)]
    return values[torch.tensor(places, device=values.device)]
