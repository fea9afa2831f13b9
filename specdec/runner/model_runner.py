"""One rank's worker: keeps sequence state and KV, runs a step's forward pass and verifies it."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specdec.model_input import ModelInput
from specdec.models import LlamaForCausalLM
from specdec.parallel import TensorParallelGroup
from specdec.sampling import SamplingBatch, sample
from specdec.step import (
    BlockTableDelta,
    SequenceAdmission,
    StepInput,
    StepRow,
    VerifiedRow,
    VerifyOutput,
)
from specdec.verification import verify_coupled


@dataclass
class SequenceState:
    """What a worker knows of a sequence between steps."""

    admission: SequenceAdmission
    block_table: list[int] = field(default_factory=list)

    def apply(self, delta: BlockTableDelta) -> None:
        """Takes over what has changed at the table's end."""
        self.block_table[delta.start :] = delta.block_ids


class ModelRunner:
    """Executes steps in order. With several ranks every one gets the same steps."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        group: TensorParallelGroup,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
    ) -> None:
        """Allocates the KV pool: `num_blocks` of `block_size` tokens."""
        self.model = model
        self.group = group
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.kv_cache = model.new_kv_cache(num_blocks * block_size)
        self._states: dict[int, SequenceState] = {}

    @torch.inference_mode()
    def execute(self, step: StepInput) -> VerifyOutput:
        """Runs one step; the same result on every rank."""
        self._update_states(step)
        if not step.rows:
            return VerifyOutput(step.step_id, ())
        hidden = self.model(self._model_input(step.rows), self.kv_cache)
        return self._verify(step, hidden)

    def warm_up(self, num_tokens: int) -> None:
        """Runs one prefill of `num_tokens` and one decode, so that the first request is not slow.

        Uses the first blocks of the pool, which must hold nothing yet.
        """
        num_blocks = -(-(num_tokens + 1) // self.block_size)
        admission = SequenceAdmission(-1, num_tokens, 1.0, 0.9, 0, 0, 0)
        table = BlockTableDelta(-1, 0, tuple(range(num_blocks)))
        prefill = StepRow(-1, 0, (0,) * num_tokens, 0, True)
        decode = StepRow(-1, num_tokens, (0,), 0, True)
        self.execute(StepInput(-1, (), (admission,), (table,), (prefill,)))
        self.execute(StepInput(-1, (), (), (), (decode,)))
        self.execute(StepInput(-1, (-1,), (), (), ()))

    def _update_states(self, step: StepInput) -> None:
        for seq_id in step.released:
            del self._states[seq_id]
        for admission in step.admitted:
            self._states[admission.seq_id] = SequenceState(admission)
        for delta in step.block_table_deltas:
            self._states[delta.seq_id].apply(delta)

    def _model_input(self, rows: Many[StepRow]) -> ModelInput:
        lengths = [len(row.token_ids) for row in rows]
        positions = np.concatenate(
            [np.arange(row.num_computed_tokens, _context_len(row)) for row in rows]
        )
        tables = self._block_tables(rows)  # [B, M]
        row_of_token = np.repeat(np.arange(len(rows)), lengths)
        blocks = tables[row_of_token, positions // self.block_size]
        return ModelInput(
            input_ids=torch.tensor([token for row in rows for token in row.token_ids]),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(blocks * self.block_size + positions % self.block_size),
            cu_seqlens_q=tuple(np.cumsum([0, *lengths]).tolist()),
            context_lens=tuple(_context_len(row) for row in rows),
            block_tables=torch.from_numpy(tables),
        )

    def _block_tables(self, rows: Many[StepRow]) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        counts = [-(-_context_len(row) // self.block_size) for row in rows]
        tables = np.zeros((len(rows), max(counts)), dtype=np.int64)
        for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
            tables[index, :count] = self._states[row.seq_id].block_table[:count]
        return tables

    def _verify(self, step: StepInput, hidden: Tensor) -> VerifyOutput:
        """hidden: [T, hidden_size]. Only the last known token and the drafts need logits."""
        rows = [row for row in step.rows if row.samples]
        if not rows:
            return VerifyOutput(step.step_id, ())
        logits = self.model.compute_logits(hidden[_scored_tokens(step.rows)])
        sampled = sample(
            logits,
            self._sampling_batch(rows),
            self.group,
            self.model.vocab_slice.start,
            self.vocab_size,
        )
        drafts = [row.token_ids[len(row.token_ids) - row.num_draft_tokens :] for row in rows]
        verified = verify_coupled(sampled, drafts)
        return VerifyOutput(
            step.step_id,
            tuple(
                VerifiedRow(row.seq_id, token_ids)
                for row, token_ids in zip(rows, verified, strict=True)
            ),
        )

    def _sampling_batch(self, rows: Many[StepRow]) -> SamplingBatch:
        """One entry for each scored token: it defines the output token at the next position."""
        admissions = [
            self._states[row.seq_id].admission for row in rows for _ in range(_num_scored(row))
        ]
        next_positions = [
            position
            for row in rows
            for position in range(_context_len(row) - _num_scored(row) + 1, _context_len(row) + 1)
        ]
        return SamplingBatch.from_lists(
            temperatures=[admission.temperature for admission in admissions],
            top_k=[admission.top_k for admission in admissions],
            top_p=[admission.top_p for admission in admissions],
            seeds=[admission.seed for admission in admissions],
            choices=[admission.choice for admission in admissions],
            positions=[
                position - admission.num_prompt_tokens
                for position, admission in zip(next_positions, admissions, strict=True)
            ],
        )


def _context_len(row: StepRow) -> int:
    return row.num_computed_tokens + len(row.token_ids)


def _num_scored(row: StepRow) -> int:
    return row.num_draft_tokens + 1


def _scored_tokens(rows: Many[StepRow]) -> list[int]:
    """Flat indices of the tokens whose logits are needed, in the rows' order."""
    scored: list[int] = []
    end = 0
    for row in rows:
        end += len(row.token_ids)
        if row.samples:
            scored.extend(range(end - _num_scored(row), end))
    return scored
