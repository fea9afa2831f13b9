"""A step on the device as it is launched: the shapes of its parts, and what its rows need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specdec.config.gpu.graph_sizes import most_padding_tokens
from specdec.sampling.device.device_sampler import SamplingKind
from specdec.worker.batch.batch_state import SequenceState
from specdec.worker.device.extras import StepExtras
from specdec.worker.device.input.columns import StepColumns
from specdec.worker.device.input.input import num_words
from specdec.worker.device.state import DeviceStepLimits
from specdec.worker.device.step_graphs import RaggedShape, StepGraphs, StepShape


class StepPlan(NamedTuple):
    """A step as it is launched.

    shape: of sampling, and of the pass where its rows have equally many tokens. ragged: of the
    pass where they have not; None otherwise. num_next, num_lookup: draft tokens that a head
    makes after it, and those to look up. grows_trees: whether some of these drafts are to be trees.
    has_chunks: whether a row does not sample.
    has_head_prompts: whether the head runs tokens of a prompt. extras: further needs of some rows;
    None where no row has any. has_adapters: whether a row has an adapter.
    """

    shape: StepShape
    kind: SamplingKind
    num_next: int = 0
    num_lookup: int = 0
    ragged: RaggedShape | None = None
    has_chunks: bool = False
    has_head_prompts: bool = False
    extras: StepExtras | None = None
    has_adapters: bool = False
    grows_trees: bool = False

    @property
    def drafts(self) -> bool:
        """Return whether there are drafts after it."""
        return self.num_next > 0 or self.num_lookup > 0

    @property
    def num_words(self) -> int:
        """Size of its input."""
        return num_words(self.shape, 0 if self.ragged is None else self.ragged.num_tokens)


class StepPlanner:
    """Finds the shapes of a step, padded to those of graphs where there are some."""

    def __init__(self, limits: DeviceStepLimits, graphs: StepGraphs, hidden_size: int) -> None:
        """hidden_size: of the model, whose tokens may be cheaper than more launches."""
        self._limits, self._graphs = limits, graphs
        self._most_padding = most_padding_tokens(hidden_size)

    def shape(self, columns: StepColumns, num_blocks: int) -> StepShape:
        """Return the shape of sampling, padded to that of a graph if there is one.

        A chain may be as long as a tree, where a proposer found no other continuation.
        """
        most = max(columns.num_drafts)
        has_trees = columns.has_trees or most > self._limits.max_draft_tokens
        return self._graphs.padded(StepShape(len(columns), 1 + most, num_blocks, has_trees))

    def is_ragged(self, columns: StepColumns) -> bool:
        """Return whether rows have prompts, or would be padded by more than launches cost."""
        if columns.has_prompts:
            return True
        shape = self.shape(columns, 0)
        return shape.num_rows * shape.query_len - columns.num_tokens > self._most_padding

    def plan(self, columns: StepColumns, states: Sequence[SequenceState]) -> StepPlan:
        """Return how a step is launched, without extras."""
        kind = max([state.sampling_kind for state in states])
        shape = self.shape(columns, num_blocks(states))
        plan = StepPlan(
            shape,
            kind,
            max(columns.num_next_drafts),
            max(columns.num_lookups),
            has_adapters=columns.has_adapters,
            grows_trees=columns.grows_trees,
        )
        if not self.is_ragged(columns):
            return plan
        sizes = (columns.num_tokens, shape.num_rows, shape.num_blocks)
        ragged = RaggedShape(*sizes, plan.has_adapters, shape.has_trees)
        return plan._replace(
            ragged=self._graphs.padded_ragged(ragged),
            has_chunks=not all(columns["samples"]),
            has_head_prompts=columns.has_head_prompts,
        )


def num_blocks(states: Sequence[SequenceState]) -> int:
    """Return the width of the block tables of sequences."""
    return max([len(state.block_table) for state in states])
