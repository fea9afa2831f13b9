"""State of a rank's sequences between steps, and the model and sampling inputs made from it."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch, SlotMove
from specdec.kernels.reference.sample_rows import SAMPLE_PARAMS, RowArgmax
from specdec.kernels.reference.state_pool import StatePool
from specdec.sampling.device.device_sampler import SamplingKind, kind_of
from specdec.sampling.logits_processors import BatchLogitsProcessor, LogitsProcessor
from specdec.sampling.replay import OutputReplay
from specdec.sampling.sampling_batch import SamplingBatch
from specdec.sampling.token_history import TokenHistory
from specdec.types.messages import (
    BlockTableDelta,
    SequenceAdmission,
    StepInput,
    StepRow,
    VerifiedRow,
)
from specdec.types.sampling.sampling_spec import SamplingRules


@dataclass
class SequenceState:
    """State of one sequence on a rank.

    sample_params: its SAMPLE_PARAMS record, with position 0.
    history: its tokens if its rules depend on them; otherwise they are not stored.
    is_plain_greedy: whether its output is the argmax of the model's own logits.
    verifies_on_device: whether chains of drafts are verified by equality, or by chance.
    num_tokens, last_token: its length and last token after the last row that sampled. held_draft,
    held_parents: what a head has drafted after them, and its tree; None for a chain.
    state_slot: of its states in recurrent layers.
    """

    admission: SequenceAdmission
    processor: LogitsProcessor
    sample_params: bytes
    history: TokenHistory | None
    is_plain_greedy: bool
    verifies_on_device: bool
    block_table: array[int] = field(default_factory=lambda: array("i"))
    num_tokens: int = 0
    last_token: int = 0
    held_draft: tuple[int, ...] = ()
    held_parents: tuple[int, ...] | None = None
    state_slot: int = 0

    @classmethod
    def of(cls, admission: SequenceAdmission, tokens: range) -> SequenceState:
        """Make the state of an admitted sequence; this rank computes the logits of `tokens`."""
        rules, text = admission.rules, (admission.token_ids, admission.num_prompt_tokens)
        history = TokenHistory(*text) if rules.needs_tokens else None
        processor = LogitsProcessor.of(rules, tokens)
        is_plain_greedy = rules.is_greedy and processor.is_noop and rules.logprobs is None
        verifies_on_device = rules.acting_verifier in ("coupled", "synthetic")
        params = SamplingBatch.of_rules([rules], [0]).params.tobytes()
        return cls(admission, processor, params, history, is_plain_greedy, verifies_on_device)

    @cached_property
    def sampling_kind(self) -> SamplingKind:
        """The work that its rows need on a device."""
        return kind_of(self.admission.rules)

    @cached_property
    def accepts_by_chance(self) -> bool:
        """Return whether its drafts are accepted by chance, whatever they are."""
        return self.admission.rules.acting_verifier == "synthetic"

    @cached_property
    def needs_checks(self) -> bool:
        """Return whether `device.eligibility` has to look at its rows one by one."""
        is_by_host = self.accepts_by_chance or not self.verifies_on_device
        has_logprobs = self.admission.rules.prompt_logprobs is not None
        return is_by_host or has_logprobs or bool(self.processor.phrases)

    @cached_property
    def has_extras(self) -> bool:
        """Return whether it needs more than sampling rules, or its tokens are followed."""
        is_edited = not self.processor.is_noop or self.history is not None
        return is_edited or self.admission.rules.logprobs is not None

    def resolved(self, row: StepRow) -> StepRow:
        """Return its row with the pending token, position and drafts."""
        held = (self.held_draft, self.held_parents)
        return row.resolved(self.num_tokens - 1, self.last_token, *held)

    def hold_draft(self, row: VerifiedRow) -> None:
        """Keep what a head has drafted after a row for the next step."""
        self.held_draft, self.held_parents = row.next_draft_token_ids, row.next_draft_parents

    def append_output(self, row: StepRow, token_ids: Sequence[int]) -> None:
        """Append the new output tokens of a row; the sequence's next row repeats the last one."""
        self.num_tokens = row.known_end + len(token_ids)
        self.last_token = token_ids[-1] if token_ids else row.known[-1]
        if self.history is not None:
            self.history.extend(token_ids)

    def chunk(self, row: StepRow) -> Chunk:
        """Return the tokens of a row for a forward pass."""
        return Chunk(
            row.token_ids,
            row.num_computed_tokens,
            self.block_table,
            row.drafting.parents,
            row.adapter_id,
            row.num_guesses,
            self.state_slot,
        )

    def apply(self, delta: BlockTableDelta) -> None:
        """Replace the end of the block table."""
        self.block_table = self.block_table[: delta.start] + array("i", delta.block_ids)

    def add_to_batch(self, batch: BatchLogitsProcessor, first_row: int, row: StepRow) -> None:
        """Add the changes of the logits of `row`, whose first row of logits is `first_row`.

        The history of each row of logits includes the draft tokens on the path to it.
        """
        num_known_output = row.known_end - self.admission.num_prompt_tokens
        for index, path in enumerate(row.paths):
            if self.history is not None:
                drafts = [row.drafts[node] for node in path]
                self.history.follow(row.known_end, drafts, is_end=True)
            mask = None if row.grammar_mask is None else row.grammar_mask[index]
            num_output_tokens = num_known_output + len(path)
            batch.add(first_row + index, self.processor, num_output_tokens, self.history, mask)
        if self.history is not None:
            self.history.truncate(row.known_end)

    def add_draft_to_batch(
        self,
        batch: BatchLogitsProcessor,
        row: int,
        num_tokens: int,
        drafted: Sequence[int],
        mask: NDArray[np.int32] | None,
    ) -> None:
        """Add the changes of the logits after `num_tokens` tokens and `drafted` as `row`."""
        num_output_tokens = num_tokens + len(drafted) - self.admission.num_prompt_tokens
        if self.history is not None:
            self.history.extend(drafted)
        batch.add(row, self.processor, num_output_tokens, self.history, mask)
        if self.history is not None:
            self.history.truncate(num_tokens)


@dataclass(frozen=True)
class TokenSpan:
    """Tokens of a sequence: those at index `position` plus each of the offsets."""

    seq_id: int
    position: int
    offsets: Sequence[int] = (0,)


class BatchState:
    """State of the sequences of one rank, updated by step messages only."""

    def __init__(
        self,
        block_size: int,
        device: torch.device,
        tokens: range,
        states: StatePool | None = None,
    ) -> None:
        """Start empty; inputs are made on `device`, and this rank computes logits of `tokens`.

        states: of recurrent layers; None without such layers.
        """
        self._block_size = block_size
        self._device = device
        self._tokens = tokens
        self._states: dict[int, SequenceState] = {}
        self._with_prompt_logprobs: set[int] = set()
        self._recurrent = states
        self._free_slots = [] if states is None else list(range(states.num_slots))

    def update(self, step: StepInput) -> None:
        """Apply the releases, admissions and block table deltas of a step."""
        for seq_id in step.released:
            released = self._states.pop(seq_id)
            if self._recurrent is not None:
                heappush(self._free_slots, released.state_slot)
            self._with_prompt_logprobs.discard(seq_id)
        for admission in step.admitted:
            state = SequenceState.of(admission, self._tokens)
            if self._recurrent is not None:
                state.state_slot = heappop(self._free_slots)
            self._states[admission.seq_id] = state
            if self._recurrent is not None:
                self._begin_states(self._recurrent, state)
            if admission.rules.prompt_logprobs is not None:
                self._with_prompt_logprobs.add(admission.seq_id)
        for delta in step.block_table_deltas:
            self._states[delta.seq_id].apply(delta)

    def _begin_states(self, states: StatePool, state: SequenceState) -> None:
        """Give an admitted sequence the states that its first row begins with."""
        admission, slot = state.admission, state.state_slot
        if admission.snapshot is None:
            states.reset(slot, is_checked=not admission.is_trial)
        else:
            states.resume(slot, *admission.snapshot)

    def save_states(self, step: StepInput) -> None:
        """Take the snapshots of a step that was run."""
        for seq_id, snapshot in step.saves:
            assert self._recurrent is not None, "a snapshot of a model without states"
            self._recurrent.save(self._states[seq_id].state_slot, *snapshot)

    def resolve_pending(self, rows: Sequence[StepRow]) -> Sequence[StepRow]:
        """Replace PENDING_TOKEN, which was not sampled when the step was scheduled."""
        return [self._states[row.seq_id].resolved(row) if row.is_pending else row for row in rows]

    def states(self, rows: Sequence[StepRow]) -> list[SequenceState]:
        """Return the state of the sequence of each row."""
        return [self._states[row.seq_id] for row in rows]

    def update_histories(self, rows: Sequence[StepRow]) -> None:
        """Store the known tokens of `rows`, without drafts, for rules that depend on tokens.

        A row that samples ends the known tokens: draft tokens after it were rejected.
        """
        for row in rows:
            history = self._states[row.seq_id].history
            if history is not None:
                history.follow(row.num_computed_tokens, row.known, is_end=row.samples)

    def append_output(self, row: StepRow, token_ids: Sequence[int]) -> None:
        """Append the new output tokens of a row; see SequenceState."""
        state = self._states[row.seq_id]
        state.append_output(row, token_ids)
        if not token_ids and self._recurrent is not None:
            self._recurrent.spoil(state.state_slot)

    def hold_drafts(self, verified: Sequence[VerifiedRow]) -> None:
        """Keep what a head has drafted for the next step."""
        for row in verified:
            self._states[row.seq_id].hold_draft(row)

    def is_plain_greedy(self, row: StepRow) -> bool:
        """Return whether the output of a row is the argmax of the model's own logits."""
        return (
            self._states[row.seq_id].is_plain_greedy
            and row.grammar_mask is None
            and not row.num_lookahead_tokens
        )

    def is_drafted_greedily(self, seq_id: int) -> bool:
        """Return whether a head drafts its own best tokens for a sequence, without noise."""
        state = self._states[seq_id]
        return state.is_plain_greedy or state.admission.rules.needs_draft_probs

    def has_plain_logits(self, seq_id: int) -> bool:
        """Return whether no penalty, bias or mask changes a sequence's logits."""
        return self._states[seq_id].processor.is_noop

    def block_table(self, seq_id: int) -> array[int]:
        """Return the blocks of a sequence, in order."""
        return self._states[seq_id].block_table

    def rules(self, seq_id: int) -> SamplingRules:
        """Return the sampling rules of a sequence."""
        return self._states[seq_id].admission.rules

    @property
    def has_prompt_logprobs(self) -> bool:
        """Return whether any sequence requests log-probabilities of its prompt."""
        return bool(self._with_prompt_logprobs)

    def next_prompt_tokens(self, row: StepRow) -> Sequence[int]:
        """Return the prompt tokens that follow the tokens of `row`, one for each."""
        state = self._states[row.seq_id]
        end = min(row.known_end + 1, state.admission.num_prompt_tokens)
        assert state.history is not None
        return state.history.token_ids[row.num_computed_tokens + 1 : end]

    def output_replay(self, row: StepRow) -> tuple[OutputReplay, int]:
        """Return the replay of a row's sequence, and the number of its prompt tokens."""
        admission = self._states[row.seq_id].admission
        count = admission.num_prompt_tokens
        return OutputReplay(admission.rules, admission.token_ids[:count], self._tokens), count

    def logits_processor(self, rows: Sequence[StepRow]) -> BatchLogitsProcessor:
        """Return the logits processor of `rows`; a row has num_draft_tokens + 1 rows of logits."""
        batch, first_row = BatchLogitsProcessor(self._tokens), 0
        for row in rows:
            state = self._states[row.seq_id]
            if not state.processor.is_noop or row.grammar_mask is not None:
                state.add_to_batch(batch, first_row, row)
            first_row += row.num_draft_tokens + 1
        return batch

    def draft_logits_processor(
        self,
        drafts: Sequence[tuple[int, int, Sequence[int]]],
        masks: Sequence[NDArray[np.int32] | None] | None = None,
    ) -> BatchLogitsProcessor:
        """Return the logits processor of the next draft token of sequences, one row for each.

        drafts: id and length of each sequence, all tokens of which are known, and the draft tokens
        after it so far. masks: the tokens that a grammar allows for each, as in StepRow; None
        where it allows all, or has no effect on any.
        """
        batch = BatchLogitsProcessor(self._tokens)
        for row, (seq_id, num_tokens, drafted) in enumerate(drafts):
            state, mask = self._states[seq_id], None if masks is None else masks[row]
            if not state.processor.is_noop or mask is not None:
                state.add_draft_to_batch(batch, row, num_tokens, drafted, mask)
        return batch

    def forward_batch(self, rows: Sequence[StepRow]) -> ForwardBatch:
        """Build the flat batch of the tokens of `rows`."""
        return ForwardBatch([self._states[row.seq_id].chunk(row) for row in rows], self._block_size)

    def draft_batch(self, rows: Sequence[StepRow], num_drafted: int) -> ForwardBatch:
        """Build the same of a draft model. num_drafted: the last draft tokens up to each row's end.

        The token before them, the last of the text, counts as a guess: it may be run again.
        """
        chunks = [self._states[row.seq_id].chunk(row) for row in rows]
        if self._recurrent is not None:
            chunks = [chunk._replace(num_guesses=num_drafted + 1) for chunk in chunks]
        return ForwardBatch(chunks, self._block_size)

    def compaction(
        self, rows: Sequence[StepRow], tokens: Mapping[int, tuple[int, ...]]
    ) -> list[SlotMove]:
        """Return the moves of slots that put the accepted paths of trees after their bases.

        tokens: the new tokens of sequences. The moves are in order: a node never stands before its
        depth, so none overwrites the source of a later one.
        """
        return [
            SlotMove(
                self._slot(row.seq_id, row.known_end + node),
                self._slot(row.seq_id, row.known_end + place),
            )
            for row in rows
            if row.drafting.parents is not None
            for place, node in enumerate(row.accepted_drafts(tokens[row.seq_id][:-1]))
            if node != place
        ]

    def keep_paths(self, rows: Sequence[StepRow], tokens: Mapping[int, tuple[int, ...]]) -> None:
        """Keep the inputs of recurrent layers for the accepted paths of trees; see `compaction`."""
        if self._recurrent is None:
            return
        for row in rows:
            if row.drafting.parents is not None:
                nodes = row.accepted_drafts(tokens[row.seq_id][:-1])
                self._recurrent.keep_path(self._states[row.seq_id].state_slot, nodes)

    def _slot(self, seq_id: int, index: int) -> int:
        block, offset = divmod(index, self._block_size)
        return self._states[seq_id].block_table[block] * self._block_size + offset

    def sampling_batch(
        self, spans: Sequence[TokenSpan], argmax: RowArgmax | None = None
    ) -> SamplingBatch:
        """Build the sampling batch of `spans`, one row of logits for each token, in order.

        argmax: of these rows, if it is known.
        """
        states = [self._states[span.seq_id] for span in spans]
        records = b"".join(
            state.sample_params * len(span.offsets)
            for state, span in zip(states, spans, strict=True)
        )
        params = np.frombuffer(bytearray(records), dtype=SAMPLE_PARAMS)
        params["position"] = [
            span.position + offset - state.admission.num_prompt_tokens
            for state, span in zip(states, spans, strict=True)
            for offset in span.offsets
        ]
        return SamplingBatch.from_params(params, self._device, argmax)
