"""A step on the device as it is launched: the shapes of its parts, and what its rows need."""

from __future__ import annotations

from typing import NamedTuple

from specdec.sampling.device.device_sampler import SamplingKind
from specdec.worker.device.extras import StepExtras
from specdec.worker.device.input.input import num_words
from specdec.worker.device.step_graphs import RaggedShape, StepShape


class StepPlan(NamedTuple):
    """A step as it is launched.

    shape: of sampling, and of the pass where its rows have equally many tokens. ragged: of the
    pass where they have not; None otherwise. num_next: draft tokens to make after it. grows_trees:
    whether some of these drafts are to be trees. has_chunks: whether a row does not sample.
    has_head_prompts: whether the head runs tokens of a prompt. extras: further needs of some rows;
    None where no row has any. has_adapters: whether a row has an adapter.
    """

    shape: StepShape
    kind: SamplingKind
    num_next: int = 0
    ragged: RaggedShape | None = None
    has_chunks: bool = False
    has_head_prompts: bool = False
    extras: StepExtras | None = None
    has_adapters: bool = False
    grows_trees: bool = False

    @property
    def num_words(self) -> int:
        """Size of its input."""
        return num_words(self.shape, 0 if self.ragged is None else self.ragged.num_tokens)
