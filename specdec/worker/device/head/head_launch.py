"""Launches of a head's drafts after the steps on the device, stage by stage."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.kernels.reference.logit_edits import LogitEdits
from specdec.sampling.device.device_trees import VerifiedChains
from specdec.worker.device.head.block import BlockDrafts
from specdec.worker.device.head.head import DraftRows, StepParts, growth_shape
from specdec.worker.device.head.state_head import StateDrafts
from specdec.worker.device.head.tree_growth import TreePairDrafts
from specdec.worker.device.input.draft_layout import NO_DRAFTS, DraftLayout
from specdec.worker.device.input.input import Word, rows_of
from specdec.worker.device.plan import StepPlan
from specdec.worker.device.rules import PARAM_WORDS
from specdec.worker.device.state import DeviceStepLimits
from specdec.worker.device.step_graphs import (
    Launch,
    Part,
    Stage,
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


class HeadLauncher:
    """Launches the drafts of a head after the steps whose buffers it shares."""

    def __init__(self, parts: HeadParts, step: StepParts, sources: Sources) -> None:
        self._buffers, self._graphs, self._sources = step.buffers, step.graphs, sources
        self._max_draft_tokens = parts.head.max_draft_tokens
        self._drafts: TreePairDrafts | BlockDrafts | StateDrafts
        match parts:
            case PairParts():
                self._drafts = TreePairDrafts(parts, step)
            case BlockParts():
                self._drafts = BlockDrafts(parts, step)
            case StateParts():
                self._drafts = StateDrafts(parts, step)
        self.stages = self._own_stages()

    @property
    def pairs(self) -> TreePairDrafts | BlockDrafts | None:
        """Drafts of a head with KV."""
        return None if isinstance(self._drafts, StateDrafts) else self._drafts

    def use(self, parts: HeadParts) -> None:
        """Draft with another head of the same sizes; graphs have to be captured again."""
        assert isinstance(parts, type(self._drafts.parts)), "a head of another kind"
        self._drafts.parts = parts
        if self.pairs is not None:
            self.pairs.forget_pass()

    def holds_tree(self, num_nodes: int, depth: int) -> bool:
        """Return whether it drafts trees of this size; depth: 0 for a chain beside trees."""
        most = self._max_draft_tokens
        if most is not None:  # drafts of a head are no deeper, and its chains no longer
            num_nodes, depth = num_nodes if depth else min(num_nodes, most), min(depth, most)
        return self._drafts.holds_tree(num_nodes, depth)

    def launch_features(self, shape: StepShape) -> None:
        """Launch what the head computes after the target's pass."""
        if self.pairs is not None:
            self._run(Stage(Part.FEATURES), shape)

    def launch_drafts(self, plan: StepPlan) -> None:
        """Launch the drafts; by operators where they have changes of logits."""
        extras = plan.extras
        edits = None if extras is None or extras.draft_edits.is_empty else extras.draft_edits
        if isinstance(self._drafts, TreePairDrafts):
            self._launch_pair_draft(self._drafts, plan, edits)
        else:
            self._launch_whole_draft(self._drafts, plan, edits)

    def _run(self, stage: Stage, shape: StepShape) -> None:
        self._graphs.run(stage, shape, self.stages[stage])

    @torch.inference_mode()
    def _launch_pair_draft(
        self, drafts: TreePairDrafts, plan: StepPlan, edits: LogitEdits | None
    ) -> None:
        self._run(Stage(Part.PAIRS), plan.shape)
        one = plan.shape._replace(query_len=1, has_trees=False)
        if plan.grows_trees:
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
        drafts, stages = self._drafts, dict[Stage, Launch]()
        if isinstance(drafts, StateDrafts):
            stages[Stage(Part.START)] = self._launch_start
        else:
            stages[Stage(Part.FEATURES)] = self._launch_features
            stages[Stage(Part.PAIRS)] = self._launch_pairs
        if isinstance(drafts, BlockDrafts):
            stages[Stage(Part.BLOCK)] = torch.inference_mode()(drafts.run_block)
        if isinstance(drafts, TreePairDrafts):
            stages[Stage(Part.ADVANCE)] = torch.inference_mode()(drafts.advance)
            stages |= stages_of_kinds(Part.DRAFT, drafts.select)
        else:
            stages |= stages_of_kinds(Part.CHAIN, drafts.draft)
        if drafts.growth is not None:
            stages |= stages_of_kinds(Part.TREE, drafts.grow)
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
        assert isinstance(self._drafts, StateDrafts)
        self._drafts.start(*self._verified(shape), self._sources(shape), shape)

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
