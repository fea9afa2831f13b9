"""One rank's worker of the target: runs a step's forward pass and verifies it."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch
from torch import Tensor

from specdec.runner.runner import Runner
from specdec.runner.sequences import SampledToken
from specdec.sampling_params import VerifierName
from specdec.sampling_rules import SamplingRules
from specdec.step import (
    BlockTableDelta,
    SequenceAdmission,
    StepInput,
    StepRow,
    VerifiedRow,
    VerifyOutput,
)
from specdec.verification import VERIFY, Draft, DraftBatch, VerifiedTokens


class ModelRunner(Runner):
    """Executes steps in order. With several ranks every one gets the same steps."""

    @torch.inference_mode()
    def execute(self, step: StepInput) -> VerifyOutput:
        """Runs one step; the same result on every rank."""
        self._sequences.update(step)
        if not step.rows:
            return VerifyOutput(step.step_id, ())
        hidden = self.model(self._sequences.model_input(step.rows), self.kv_cache)
        return self._verify(step, hidden)

    def warm_up(self, num_tokens: int) -> None:
        """Runs one prefill of `num_tokens` and one decode, so that the first request is not slow.

        Uses the first blocks of the pool, which must hold nothing yet.
        """
        num_blocks = -(-(num_tokens + 1) // self.block_size)
        admission = SequenceAdmission(-1, num_tokens, SamplingRules(top_p=0.9))
        table = BlockTableDelta(-1, 0, tuple(range(num_blocks)))
        prefill = StepRow(-1, 0, (0,) * num_tokens, 0, True)
        decode = StepRow(-1, num_tokens, (0,), 0, True)
        self.execute(StepInput(-1, (), (admission,), (table,), (prefill,)))
        self.execute(StepInput(-1, (), (), (), (decode,)))
        self.execute(StepInput(-1, (-1,), (), (), ()))

    def _verify(self, step: StepInput, hidden: Tensor) -> VerifyOutput:
        """hidden: [T, hidden_size]. Only the last known token and the drafts need logits."""
        rows = [row for row in step.rows if row.samples]
        if not rows:
            return VerifyOutput(step.step_id, ())
        logits = self._scores(hidden[_scored_tokens(step.rows)])
        verified = self._verified(rows, logits)
        return VerifyOutput(
            step.step_id,
            tuple(
                VerifiedRow(row.seq_id, token_ids)
                for row, token_ids in zip(rows, verified, strict=True)
            ),
        )

    def _verified(self, rows: Many[StepRow], logits: Tensor) -> list[tuple[int, ...]]:
        """The new tokens of each row; logits: [sum of num_draft_tokens + 1, len(vocab_slice)]."""
        verified: list[tuple[int, ...]] = [()] * len(rows)
        ends = np.cumsum([row.num_draft_tokens + 1 for row in rows])
        scored = np.split(np.arange(len(logits)), ends[:-1])
        for name, members in self._by_verifier(rows).items():
            judged = [rows[member] for member in members]
            own = logits
            if len(judged) < len(rows):
                places = np.concatenate([scored[member] for member in members])
                own = logits[torch.from_numpy(places).to(logits.device)]
            for member, token_ids in zip(members, self._judge(name, judged, own), strict=True):
                verified[member] = token_ids
        return verified

    def _judge(self, name: VerifierName, rows: Many[StepRow], logits: Tensor) -> VerifiedTokens:
        batch = self._sequences.sampling_batch([token for row in rows for token in _coming(row)])
        drafts = DraftBatch([self._draft(row) for row in rows], logits.device)
        return VERIFY[name](logits, batch, drafts, self._shard)

    def _by_verifier(self, rows: Many[StepRow]) -> dict[VerifierName, list[int]]:
        """The indices of the rows that each verifier judges."""
        members_of: dict[VerifierName, list[int]] = {}
        for index, row in enumerate(rows):
            name = self._sequences.rules(row.seq_id).acting_verifier
            members_of.setdefault(name, []).append(index)
        return members_of

    def _draft(self, row: StepRow) -> Draft:
        token_ids = row.token_ids[len(row.token_ids) - row.num_draft_tokens :]
        return Draft(token_ids, self._sequences.rules(row.seq_id).verifier, row.draft_probs)


def _coming(row: StepRow) -> list[SampledToken]:
    """What the last known token of a row and its drafts define: the tokens behind their own."""
    positions = range(row.end - row.num_draft_tokens, row.end + 1)
    return [SampledToken(row.seq_id, position) for position in positions]


def _scored_tokens(rows: Many[StepRow]) -> list[int]:
    """Flat indices of the tokens whose logits are needed, in the rows' order."""
    scored: list[int] = []
    end = 0
    for row in rows:
        end += len(row.token_ids)
        if row.samples:
            scored.extend(range(end - row.num_draft_tokens - 1, end))
    return scored
