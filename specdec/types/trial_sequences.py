"""Sequences of the steps that run before the first request: profiles and probes of the models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.types.messages import BlockTableDelta, SequenceAdmission, StepInput
from specdec.types.sampling.sampling_spec import SamplingRules

_GREEDY = SamplingRules(temperature=0.0)


@dataclass(frozen=True)
class TrialSequences:
    """Greedy sequences on a worker that has no others, numbered from 0.

    They must be released before an engine numbers its own from there.

    texts: their first tokens, at least one each.
    num_slots: KV slots of each, for all tokens and guesses that it will ever have.
    block_size, num_blocks: of the worker's pool. In a small pool several sequences share a block.
    """

    texts: Sequence[tuple[int, ...]]
    num_slots: int
    block_size: int
    num_blocks: int

    @property
    def seq_ids(self) -> tuple[int, ...]:
        """Their ids."""
        return tuple(range(len(self.texts)))

    @property
    def admissions(self) -> tuple[SequenceAdmission, ...]:
        """The admission of each."""
        return tuple(
            SequenceAdmission(seq_id, len(text), _GREEDY, text, is_trial=True)
            for seq_id, text in enumerate(self.texts)
        )

    @property
    def block_tables(self) -> tuple[BlockTableDelta, ...]:
        """The whole block table of each."""
        length = -(-self.num_slots // self.block_size)
        return tuple(
            BlockTableDelta(
                seq_id,
                0,
                tuple((seq_id * length + index) % self.num_blocks for index in range(length)),
            )
            for seq_id in self.seq_ids
        )

    def admit(self) -> StepInput:
        """Return a target's step that admits them and runs nothing."""
        return StepInput(0, (), self.admissions, self.block_tables, ())

    def release(self) -> StepInput:
        """Return a target's step that releases them and runs nothing."""
        return StepInput(0, self.seq_ids, (), (), ())
