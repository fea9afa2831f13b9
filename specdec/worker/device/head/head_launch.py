"""Launches of a head's drafts after the steps on the device, stage by stage."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.kernels.reference.logit_edits import LogitEdits
from specdec.sampling.device.device_growth import GrowthShape
from specdec.sampling.device.device_trees import VerifiedChains
from specdec.worker.device.head.block import BlockDrafts
from specdec.worker.device.head.head import DraftRows
from specdec.worker.device.head.pairs import PairDrafts
from specdec.worker.device.head.state_head import StateDrafts
from specdec.worker.device.head.tree_growth import TreePairDrafts
from specdec.worker.device.input.buffers import StepBuffers
from specdec.worker.device.input.draft_layout import NO_DRAFTS, DraftLayout
from specdec.worker.device.input.input import Word, rows_of
from specdec.worker.device.plan import StepPlan
from specdec.worker.device.rules import PARAM_WORDS
from specdec.worker.device.state import DeviceState, DeviceStepLimits
from specdec.worker.device.step_graphs import (
    Launch,
    Part,
    Stage,
    StepGraphs,
    StepShape,
    stages_of_kinds,
)
from specdec.worker.head.parts import (
    BlockParts,
    DrafterParts,
    HeadParts,
    PairParts,
    StateParts,
)

Sources = Callable[[StepShape], Tensor]
"""Returns the hidden state that each new token of a step was sampled by, [num_rows, Q]."""


def draft_layout(parts: DrafterParts | None, limits: DeviceStepLimits) -> DraftLayout:
    """Return the layout of the drafts of a head, of lookups, or of both."""
    if parts is None:
        return NO_DRAFTS
    of_head = DraftLayout(limits.max_draft_tokens)
    if parts.head is not None:
        of_head = _layout_of_head(parts.head, limits)
    return of_head._replace(has_lookups=parts.lookup is not None)


def _layout_of_head(parts: HeadParts, limits: DeviceStepLimits) -> DraftLayout:
    growth = growth_shape(parts, limits)
    most = limits.max_draft_tokens if growth is None else max(limits.max_draft_tokens, *growth)
    has_confidences = parts.sampler.has_confidences
    assert growth is None or not has_confidences, "confidences divide the tokens of chains"
    return DraftLayout(most, has_parents=growth is not None, has_confidences=has_confidences)


def growth_shape(parts: HeadParts, limits: DeviceStepLimits) -> GrowthShape | None:
    """Return the largest trees that a head drafts on the device; None where it drafts none.

    They grow level by level where a node's logits depend on its path, and else best first.
    """
    head = parts.head
    grows_by_level = isinstance(parts, PairParts) and head.capabilities.runs_nodes
    is_given = isinstance(parts, StateParts) and parts.has_tree_choices
    if not limits.max_tree_nodes or head.reads_drafts != grows_by_level or is_given:
        return None
    depth = min(limits.max_tree_depth, head.max_draft_tokens or limits.max_tree_depth)
    return GrowthShape(limits.max_tree_nodes, depth)


class HeadLauncher:
    """Launches the drafts of a head after the steps whose buffers it shares."""

    def __init__(
        self,
        parts: HeadParts,
        buffers: StepBuffers,
        state: DeviceState,
        limits: DeviceStepLimits,
        graphs: StepGraphs,
        sources: Sources,
    ) -> None:
        self._buffers, self._graphs, self._sources = buffers, graphs, sources
        self.pairs: PairDrafts | BlockDrafts | None = None
        self._states: StateDrafts | None = None
        self._max_draft_tokens = parts.head.max_draft_tokens
        hidden_size = buffers.hidden.shape[1]
        outputs = (buffers.drafts(limits.max_num_seqs), buffers.layout)
        growth = growth_shape(parts, limits)
        if isinstance(parts, PairParts):
            arguments = (parts, state, limits, hidden_size, *outputs)
            if growth is None:
                self.pairs = PairDrafts(*arguments)
            else:
                self.pairs = TreePairDrafts(*arguments, growth)
        elif isinstance(parts, BlockParts):
            self.pairs = BlockDrafts(parts, state, limits, hidden_size, *outputs, growth)
        else:
            self._states = StateDrafts(parts, state, limits, buffers.hidden, *outputs, growth)
        self.stages = self._own_stages()

    def use(self, parts: HeadParts) -> None:
        """Draft with another head of the same sizes; graphs have to be captured again."""
        match self.pairs or self._states, parts:
            case (PairDrafts() as pairs, PairParts()):
                pairs.use(parts)
            case (BlockDrafts() as blocks, BlockParts()):
                blocks.use(parts)
            case (StateDrafts() as states, StateParts()):
                states.use(parts)
            case _:
                raise AssertionError("a head of another kind")

    def holds_tree(self, num_nodes: int, depth: int) -> bool:
        """Return whether it drafts trees of this size; depth: 0 for a chain beside trees."""
        drafts, most = self.pairs or self._states, self._max_draft_tokens
        if most is not None:  # drafts of a head are no deeper, and its chains no longer
            num_nodes, depth = num_nodes if depth else min(num_nodes, most), min(depth, most)
        return drafts is not None and drafts.holds_tree(num_nodes, depth)

    def launch_features(self, shape: StepShape) -> None:
        """Launch what the head computes after the target's pass."""
        if self.pairs is not None:
            self._run(Stage(Part.FEATURES), shape)

    def launch_drafts(self, plan: StepPlan) -> None:
        """Launch the drafts; by operators where they have changes of logits."""
        extras = plan.extras
        edits = None if extras is None or extras.draft_edits.is_empty else extras.draft_edits
        if isinstance(self.pairs, PairDrafts):
            self._launch_pair_draft(self.pairs, plan, edits)
        elif (drafts := self.pairs or self._states) is not None:
            self._launch_whole_draft(drafts, plan, edits)

    def _run(self, stage: Stage, shape: StepShape) -> None:
        self._graphs.run(stage, shape, self.stages[stage])

    @torch.inference_mode()
    def _launch_pair_draft(
        self, drafts: PairDrafts, plan: StepPlan, edits: LogitEdits | None
    ) -> None:
        self._run(Stage(Part.PAIRS), plan.shape)
        one = plan.shape._replace(query_len=1, has_trees=False)
        if plan.grows_trees:
            assert isinstance(drafts, TreePairDrafts), "the host drafts trees"
            if edits is None:
                self._run(Stage(Part.TREE, plan.kind), one)
            else:
                drafts.grow(plan.kind, one, edits)
            return
        for index in range(plan.num_next):
            if index > 0:
                self._run(Stage(Part.ADVANCE), one)
            if edits is None:
                self._run(Stage(Part.DRAFT, plan.kind), one)
            else:
                drafts.select(plan.kind, one, edits)

    @torch.inference_mode()
    def _launch_whole_draft(
        self, drafts: StateDrafts | BlockDrafts, plan: StepPlan, edits: LogitEdits | None
    ) -> None:
        is_block = isinstance(drafts, BlockDrafts)
        self._run(Stage(Part.PAIRS if is_block else Part.START), plan.shape)
        depth = drafts.growth.depth if plan.grows_trees and drafts.growth else plan.num_next
        shape = plan.shape._replace(query_len=1 + depth, has_trees=False)
        padded = self._graphs.padded(shape)
        shape = padded if padded.num_rows == shape.num_rows else shape  # the rows of the step
        if is_block:
            self._run(Stage(Part.BLOCK), shape)
        part, draft = Part.CHAIN, drafts.draft
        if plan.grows_trees:
            part, draft, shape = Part.TREE, drafts.grow, shape._replace(query_len=1)
        if edits is None:
            self._run(Stage(part, plan.kind), shape)
        else:
            draft(plan.kind, shape, edits)

    def _own_stages(self) -> dict[Stage, Launch]:
        stages: dict[Stage, Launch] = {}
        if (pairs := self.pairs) is not None:
            stages = {
                Stage(Part.FEATURES): self._launch_features,
                Stage(Part.PAIRS): self._launch_pairs,
            }
            if isinstance(pairs, BlockDrafts):
                stages[Stage(Part.BLOCK)] = torch.inference_mode()(pairs.run_block)
                return stages | _whole_stages(pairs)
            stages[Stage(Part.ADVANCE)] = torch.inference_mode()(pairs.advance)
            stages |= stages_of_kinds(Part.DRAFT, pairs.select)
            if isinstance(pairs, TreePairDrafts):
                stages |= stages_of_kinds(Part.TREE, pairs.grow)
        elif (states := self._states) is not None:
            stages = {Stage(Part.START): self._launch_start}
            stages |= _whole_stages(states)
        return stages

    @torch.inference_mode()
    def _launch_features(self, shape: StepShape) -> None:
        assert self.pairs is not None
        self.pairs.add_features(self._buffers.hidden[: shape.num_rows * shape.query_len])

    @torch.inference_mode()
    def _launch_pairs(self, shape: StepShape) -> None:
        """Launch the head's pass over the tokens that were verified."""
        assert self.pairs is not None
        if shape.has_trees:
            self.pairs.gather(self._sources(shape).flatten())
        self.pairs.run_pairs(*self._verified(shape), shape)

    @torch.inference_mode()
    def _launch_start(self, shape: StepShape) -> None:
        """Launch what a head without KV takes from the step."""
        assert self._states is not None
        self._states.start(*self._verified(shape), self._sources(shape), shape)

    def _verified(self, shape: StepShape) -> tuple[DraftRows, VerifiedChains]:
        """Return the rows of a step, and their new tokens."""
        table, results = rows_of(self._buffers.input, shape), self._buffers.results(shape)
        rows = DraftRows(
            table[:, :PARAM_WORDS],
            table[:, Word.SLOT],
            table[:, Word.NUM_PROMPT],
            table[:, Word.NUM_NEXT],
            table[:, Word.NEXT_DEPTH],
        )
        return rows, VerifiedChains(results[:, 1:], results[:, 0])


def _whole_stages(drafts: BlockDrafts | StateDrafts) -> dict[Stage, Launch]:
    """Return the stages that select all tokens of drafts."""
    stages = stages_of_kinds(Part.CHAIN, drafts.draft)
    return stages if drafts.growth is None else stages | stages_of_kinds(Part.TREE, drafts.grow)
