"""Decides which steps, and which parts of a step, the host runs in place of the device.

Every reason stands here. A rank without DeviceSteps runs all steps on the host: on a CPU, and for
an architecture without fixed shapes (`worker.loading`). Where a rank has them:

- `HostReason`: the device cannot run the step. `StepEligibility.reason` finds the first one.
- `verified_by_host`: the device runs the model, and the host verifies some of the rows, by
  probabilities or with other noise. Such a step is not begun ahead.
- `drafted_by_host`: the device runs and verifies the step, and the host drafts after some rows.
- A single rank runs a step on the host for which the device has no memory, unless layers are
  recurrent (`DeviceQueue.begin`).

A step that has to wait for the one in flight (`DeviceQueue.has_room`) runs on the device later.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from specdec.types.messages import RowDrafting, StepRow
from specdec.worker.batch.batch_state import SequenceState
from specdec.worker.device.decoder import DeviceDecoder
from specdec.worker.device.input.columns import StepColumns
from specdec.worker.device.launch import StepLauncher
from specdec.worker.device.plan import StepPlanner, num_blocks
from specdec.worker.device.state import DeviceState, DeviceStepLimits
from specdec.worker.head.drafter import RankDrafter


class HostReason(Enum):
    """Why the device cannot run a step, in the order in which this is checked."""

    MISSING_PAIRS = "the head lacks the KV of earlier tokens of a sequence, or lookups their text"
    SEQUENCES = "more sequences than max_num_seqs"
    LOOKAHEAD = "lookahead tokens, whose predictions the device does not return"
    ADAPTERS = "adapters, on a decoder that does not run them by Triton's kernels"
    PENDING_VERIFIER = "a pending row that the host has to verify"
    PROMPT_LOGPROBS = "log-probabilities of a prompt"
    PENDING_KEPT = "drafts that are accepted by chance, and whose number the host does not know"
    PENDING_BAD_WORDS = "bad words of several tokens, of which the host does not know the last one"
    ROW_TOKENS = "more drafts of a sequence than its chains or trees may have"
    SCORED_TOKENS = "more last known tokens and drafts, with padding, than fit the buffers"
    NEXT_DRAFTS = "longer next drafts than the device makes, or any where nothing drafts there"
    NEXT_TREES = "more next trees than the step after this one has room for"
    NEXT_TREE_SIZE = "a next tree with more nodes or levels than configured"
    PROMPTS = "prompts, on a rank that launches no steps with these"
    ROW_LENGTHS = "rows of very different lengths, on such a rank"
    STEP_TOKENS = "more tokens than max_num_batched_tokens"
    ATTENTION = "more tokens or longer sequences than the attention takes in one such pass"
    PLACES = "no free place for a sequence among those that the device holds"


def verified_by_host(rows: Sequence[StepRow], states: Sequence[SequenceState]) -> frozenset[int]:
    """Return the ids of the sequences whose rows the host has to verify."""
    pairs = zip(rows, states, strict=True)
    return frozenset(row.seq_id for row, state in pairs if _is_verified_by_host(row, state))


def drafted_by_host(
    rows: Sequence[StepRow], states: Sequence[SequenceState]
) -> list[frozenset[int]]:
    """Return which sequences the host drafts for, to be tried in order: few, then all for trees.

    Drafts need the verified tokens, and the device may not hold the trees that are wanted.
    """
    choices = [verified_by_host(rows, states)]
    if any(row.drafting.next_depth for row in rows):
        choices.append(frozenset(row.seq_id for row in rows))
    return choices


class StepEligibility:
    """Finds out whether the device can run a step of one row or more without the host."""

    def __init__(
        self,
        model: DeviceDecoder,
        limits: DeviceStepLimits,
        state: DeviceState,
        planner: StepPlanner,
        launcher: StepLauncher,
        max_next_drafts: int,
    ) -> None:
        """max_next_drafts: of a chain that is made on the device; 0 where nothing drafts there."""
        self._model, self._limits, self._state = model, limits, state
        self._planner, self._launcher = planner, launcher
        self._max_next_drafts = max_next_drafts

    def reason(
        self,
        columns: StepColumns,
        states: Sequence[SequenceState],
        drafter: RankDrafter | None = None,
        preceding: Sequence[StepRow] = (),
    ) -> HostReason | None:
        """Return why the device cannot run a step; None where it can, and holds its sequences.

        drafter: drafts at the end of the step. preceding: rows of the step in flight, whose tokens
        pending rows continue.
        """
        return (
            _reason_of_drafter(drafter, columns.rows, preceding)
            or self._reason_of_features(columns)
            or _reason_of_rows(columns.rows, states)
            or self._reason_of_shape(columns)
            or self._reason_of_next_drafts(columns)
            or self._reason_of_ragged(columns, states)
            or self._reason_of_places(columns)
        )

    def _reason_of_features(self, columns: StepColumns) -> HostReason | None:
        if len(columns) > self._limits.max_num_seqs:
            return HostReason.SEQUENCES
        if any(columns["num_lookahead_tokens"]):
            return HostReason.LOOKAHEAD
        if columns.has_adapters and self._model.adapter_places is None:
            return HostReason.ADAPTERS
        return None

    def _reason_of_shape(self, columns: StepColumns) -> HostReason | None:
        shape, limits = self._planner.shape(columns, 0), self._limits
        if shape.query_len > limits.max_query_len:
            return HostReason.ROW_TOKENS
        if shape.num_rows * shape.query_len > limits.max_scored_tokens:
            return HostReason.SCORED_TOKENS
        return None

    def _reason_of_next_drafts(self, columns: StepColumns) -> HostReason | None:
        if not columns.grows_trees:
            is_long = max(*columns.num_next_drafts, *columns.num_lookups) > self._max_next_drafts
            return HostReason.NEXT_DRAFTS if is_long else None
        if self._planner.shape(columns, 0).num_rows > self._limits.max_growing_rows:
            return HostReason.NEXT_TREES
        wanted = (row.drafting for row in columns.rows if row.samples)
        if all(self._launcher.holds_tree(each.num_next, each.next_depth) for each in wanted):
            return None
        return HostReason.NEXT_TREE_SIZE

    def _reason_of_ragged(
        self, columns: StepColumns, states: Sequence[SequenceState]
    ) -> HostReason | None:
        """Return why one pass over the tokens of all rows is not possible, if it is needed."""
        if not self._planner.is_ragged(columns):
            return None
        if not self._launcher.runs_ragged:
            return HostReason.PROMPTS if columns.has_prompts else HostReason.ROW_LENGTHS
        if columns.num_tokens > self._limits.max_step_tokens:
            return HostReason.STEP_TOKENS
        fits = self._model.fits_ragged(columns.num_tokens, num_blocks(states))
        return None if fits else HostReason.ATTENTION

    def _reason_of_places(self, columns: StepColumns) -> HostReason | None:
        """Take a place for each sequence; the last check, as it changes the state."""
        has_places = all(map(self._state.has_place, columns["seq_id"]))
        return None if has_places else HostReason.PLACES


def _reason_of_drafter(
    drafter: RankDrafter | None, rows: Sequence[StepRow], preceding: Sequence[StepRow]
) -> HostReason | None:
    """Return why drafts cannot follow, where pairs or texts lack more than new tokens."""
    if drafter is None or not drafter.follows_steps:
        return None
    before = {row.seq_id: row.drafting for row in preceding}
    is_complete = all(
        _continues(row.drafting, before[row.seq_id])
        if row.seq_id in before
        else drafter.has_pairs_before(row)
        for row in rows
        if row.drafting.num_next or row.drafting.num_lookup
    )
    return None if is_complete else HostReason.MISSING_PAIRS


def _continues(drafting: RowDrafting, before: RowDrafting) -> bool:
    """Return whether what drafts after a row has drafted after the one before it, too."""
    has_head = before.num_next > 0 or not drafting.num_next
    return has_head and (before.num_lookup > 0 or not drafting.num_lookup)


def _reason_of_rows(rows: Sequence[StepRow], states: Sequence[SequenceState]) -> HostReason | None:
    for row, state in zip(rows, states, strict=True):
        if state.needs_checks and (reason := _reason_of_row(row, state)):
            return reason
    return None


def _reason_of_row(row: StepRow, state: SequenceState) -> HostReason | None:
    """Return why the device cannot run a row of a sequence that `needs_checks`."""
    admission = state.admission
    if row.is_pending and _is_verified_by_host(row, state):
        return HostReason.PENDING_VERIFIER
    is_in_prompt = row.num_computed_tokens + 1 < admission.num_prompt_tokens
    is_listed = is_in_prompt or admission.rules.replay is not None
    if admission.rules.prompt_logprobs is not None and is_listed:
        return HostReason.PROMPT_LOGPROBS
    if state.accepts_by_chance and row.is_pending and row.drafting.num_held:
        return HostReason.PENDING_KEPT
    if row.is_pending and state.processor.phrases:
        return HostReason.PENDING_BAD_WORDS
    return None


def _is_verified_by_host(row: StepRow, state: SequenceState) -> bool:
    return row.samples and not state.verifies_on_device
