"""What a worker knows of its sequences between steps, and the tensors it makes of it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from specdec.kernels.forward_batch import Chunk, ModelInput
from specdec.kernels.sample import SAMPLE_PARAMS, RowArgmax
from specdec.sampling import LogitEdits, SamplingBatch, Shaping, TokenHistory
from specdec.types.messages import (
    PENDING_TOKEN,
    BlockTableDelta,
    SequenceAdmission,
    StepInput,
    StepRow,
)
from specdec.types.sampling_spec import SamplingRules


@dataclass
class SequenceState:
    """A sequence as its worker sees it.

    draw: how its tokens are drawn, one of SAMPLE_PARAMS but for the position.
    history: its tokens, where its rules go by them; otherwise the worker does not know them.
    takes_best: whether its rules ask for the model's best tokens, and nothing else.
    last_token: of its output, as far as the worker has seen it.
    """

    admission: SequenceAdmission
    shaping: Shaping
    draw: bytes
    history: TokenHistory | None
    takes_best: bool
    block_table: array[int] = field(default_factory=lambda: array("i"))
    last_token: int = 0

    @classmethod
    def of(cls, admission: SequenceAdmission, tokens: range) -> SequenceState:
        """tokens: whose logits this rank computes."""
        num_prompt_tokens, rules = admission.num_prompt_tokens, admission.rules
        history = None
        if rules.needs_tokens:
            history = TokenHistory(admission.token_ids, num_prompt_tokens)
        shaping = Shaping.of(rules, tokens)
        takes_best = rules.is_greedy and shaping.is_idle and rules.logprobs is None
        return cls(admission, shaping, _draw_of(rules), history, takes_best)

    def apply(self, delta: BlockTableDelta) -> None:
        """Takes over what has changed at the table's end."""
        self.block_table = self.block_table[: delta.start] + array("i", delta.block_ids)

    def add_edits(self, edits: LogitEdits, first_row: int, row: StepRow) -> None:
        """What its rules do to the logits of `row`, which are those from `first_row` on.

        Each of them assumes that the drafts before it are output.
        """
        known = row.known_end
        for ahead in range(row.num_draft_tokens + 1):
            if ahead and self.history is not None:
                self.history.append(row.drafts[ahead - 1])
            mask = None if row.grammar_mask is None else row.grammar_mask[ahead]
            num_output_tokens = known + ahead - self.admission.num_prompt_tokens
            edits.add(first_row + ahead, self.shaping, num_output_tokens, self.history, mask)
        if self.history is not None:
            self.history.truncate(known)


@dataclass(frozen=True)
class TokensToCome:
    """The `count` tokens from index `position` of a sequence's tokens on."""

    seq_id: int
    position: int
    count: int = 1


class SequenceTable:
    """The sequences of one worker; kept up to date by the steps alone."""

    def __init__(self, block_size: int, device: torch.device, tokens: range) -> None:
        """`device` is where the tensors are made; `tokens`: whose logits this rank computes."""
        self._block_size = block_size
        self._device = device
        self._tokens = tokens
        self._states: dict[int, SequenceState] = {}
        self._prompt_readers: set[int] = set()

    def update(self, step: StepInput) -> None:
        """Applies what a step says of sequences' lives."""
        for seq_id in step.released:
            del self._states[seq_id]
            self._prompt_readers.discard(seq_id)
        for admission in step.admitted:
            self._states[admission.seq_id] = SequenceState.of(admission, self._tokens)
            if admission.rules.prompt_logprobs is not None:
                self._prompt_readers.add(admission.seq_id)
        for delta in step.block_table_deltas:
            self._states[delta.seq_id].apply(delta)

    def settled(self, rows: Sequence[StepRow]) -> Sequence[StepRow]:
        """The rows with the tokens that were pending when the step was made."""
        return [
            row._replace(token_ids=(self._states[row.seq_id].last_token,))
            if row.token_ids[0] == PENDING_TOKEN
            else row
            for row in rows
        ]

    def follow(self, rows: Sequence[StepRow]) -> None:
        """Takes note of the tokens of `rows` that are known, and not drafts, where rules need it.

        A row that samples ends what is known: drafted tokens behind it have not come true.
        """
        for row in rows:
            history = self._states[row.seq_id].history
            if history is not None:
                history.follow(row.num_computed_tokens, row.known, is_end=row.samples)

    def extend(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """Takes note of output that comes behind what is known: the next row repeats the last."""
        state = self._states[seq_id]
        if token_ids:
            state.last_token = token_ids[-1]
        if state.history is not None:
            state.history.extend(token_ids)

    def takes_best(self, row: StepRow) -> bool:
        """Whether a row asks for nothing but the best tokens by the model's own logits."""
        return (
            self._states[row.seq_id].takes_best
            and row.grammar_mask is None
            and not row.num_lookahead_tokens
        )

    def rules(self, seq_id: int) -> SamplingRules:
        """How the tokens of a sequence are drawn."""
        return self._states[seq_id].admission.rules

    @property
    def has_prompt_readers(self) -> bool:
        """Whether some sequence asks for log-probabilities of its prompt."""
        return bool(self._prompt_readers)

    def prompt_after(self, row: StepRow) -> Sequence[int]:
        """The tokens of the prompt that follow those that `row` runs, one each."""
        state = self._states[row.seq_id]
        end = min(row.known_end + 1, state.admission.num_prompt_tokens)
        assert state.history is not None
        return state.history.token_ids[row.num_computed_tokens + 1 : end]

    def logit_edits(self, rows: Sequence[StepRow]) -> LogitEdits:
        """What the rules do to the logits of `rows`: one more each than it has drafts, in order."""
        edits, first_row = LogitEdits(self._tokens), 0
        for row in rows:
            state = self._states[row.seq_id]
            if not state.shaping.is_idle or row.grammar_mask is not None:
                state.add_edits(edits, first_row, row)
            first_row += row.num_draft_tokens + 1
        return edits

    def model_input(self, rows: Sequence[StepRow]) -> ModelInput:
        """The flat batch that runs the tokens of `rows`."""
        chunks = [
            Chunk(
                row.token_ids,
                row.num_computed_tokens,
                self._states[row.seq_id].block_table,
                row.positions,
            )
            for row in rows
        ]
        return ModelInput(chunks, self._block_size)

    def sampling_batch(
        self, tokens: Sequence[TokensToCome], argmax: RowArgmax | None = None
    ) -> SamplingBatch:
        """How to draw `tokens`, one row of logits each, in order; argmax: of these, where known."""
        states = [self._states[run.seq_id] for run in tokens]
        records = b"".join(
            state.draw * run.count for state, run in zip(states, tokens, strict=True)
        )
        params = np.frombuffer(bytearray(records), dtype=SAMPLE_PARAMS)
        params["position"] = [
            position - state.admission.num_prompt_tokens
            for state, run in zip(states, tokens, strict=True)
            for position in range(run.position, run.position + run.count)
        ]
        return SamplingBatch.from_params(params, self._device, argmax)


def _draw_of(rules: SamplingRules) -> bytes:
    batch = SamplingBatch.from_lists(
        temperatures=[rules.temperature],
        top_k=[rules.top_k],
        top_p=[rules.top_p],
        min_p=[rules.min_p],
        seeds=[rules.seed],
        choices=[rules.choice],
        positions=[0],
    )
    return batch.params.tobytes()
