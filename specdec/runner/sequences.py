"""What a worker knows of its sequences between steps, and the tensors it makes of it."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.model_input import ModelInput
from specdec.sampling import SamplingBatch
from specdec.sampling_rules import SamplingRules
from specdec.step import BlockTableDelta, SequenceAdmission, StepInput, StepRow


@dataclass
class SequenceState:
    """A sequence as its worker sees it."""

    admission: SequenceAdmission
    block_table: list[int] = field(default_factory=list)

    def apply(self, delta: BlockTableDelta) -> None:
        """Takes over what has changed at the table's end."""
        self.block_table[delta.start :] = delta.block_ids


@dataclass(frozen=True)
class SampledToken:
    """A token to come: the one at index `position` of a sequence's tokens."""

    seq_id: int
    position: int


class SequenceTable:
    """The sequences of one worker; kept up to date by the steps alone."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        """`device` is where the tensors are made."""
        self._block_size = block_size
        self._device = device
        self._states: dict[int, SequenceState] = {}

    def update(self, step: StepInput) -> None:
        """Applies what a step says of sequences' lives."""
        for seq_id in step.released:
            del self._states[seq_id]
        for admission in step.admitted:
            self._states[admission.seq_id] = SequenceState(admission)
        for delta in step.block_table_deltas:
            self._states[delta.seq_id].apply(delta)

    def model_input(self, rows: Many[StepRow]) -> ModelInput:
        """The flat batch that runs the tokens of `rows`."""
        lengths = [len(row.token_ids) for row in rows]
        positions = np.concatenate([np.arange(row.num_computed_tokens, row.end) for row in rows])
        tables = self._block_tables(rows)  # [B, M]
        row_of_token = np.repeat(np.arange(len(rows)), lengths)
        blocks = tables[row_of_token, positions // self._block_size]
        slots = blocks * self._block_size + positions % self._block_size
        return ModelInput(
            input_ids=self._tensor(np.array([token for row in rows for token in row.token_ids])),
            positions=self._tensor(positions),
            slot_mapping=self._tensor(slots),
            cu_seqlens_q=tuple(np.cumsum([0, *lengths]).tolist()),
            context_lens=tuple(row.end for row in rows),
            block_tables=self._tensor(tables),
        )

    def rules(self, seq_id: int) -> SamplingRules:
        """How a sequence's tokens are drawn."""
        return self._states[seq_id].admission.rules

    def sampling_batch(self, tokens: Many[SampledToken]) -> SamplingBatch:
        """How to draw `tokens`, one row of logits each."""
        admissions = [self._states[token.seq_id].admission for token in tokens]
        return SamplingBatch.from_lists(
            temperatures=[admission.rules.temperature for admission in admissions],
            top_k=[admission.rules.top_k for admission in admissions],
            top_p=[admission.rules.top_p for admission in admissions],
            seeds=[admission.rules.seed for admission in admissions],
            choices=[admission.rules.choice for admission in admissions],
            positions=[
                token.position - admission.num_prompt_tokens
                for token, admission in zip(tokens, admissions, strict=True)
            ],
            device=self._device,
        )

    def _block_tables(self, rows: Many[StepRow]) -> NDArray[np.int64]:
        counts = [-(-row.end // self._block_size) for row in rows]
        tables = np.zeros((len(rows), max(counts)), dtype=np.int64)
        for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
            tables[index, :count] = self._states[row.seq_id].block_table[:count]
        return tables

    def _tensor(self, values: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)
