"""Drafts of a draft model as steps on the device, of which none waits for the one before.

Each draft token is a step whose token and position are those that the step before has left on the
device; the host launches all of them, and then waits once. Tokens that the draft model lacks are
accepted drafts of the first step: where the target has accepted a whole draft, these are two.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from specdec.types.draft_messages import DraftRow
from specdec.types.messages import PENDING_TOKEN, BlockTableDelta, StepRow
from specdec.types.sampling.sampling_params import MAX_NUM_SPECULATIVE_TOKENS
from specdec.worker.batch.batch_state import BatchState, SequenceState
from specdec.worker.device.input.buffers import PendingTokens
from specdec.worker.device.input.columns import StepColumns
from specdec.worker.device.steps import DeviceSteps

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT = MAX_NUM_SPECULATIVE_TOKENS
"""Steps of a draft: as many as the longest draft has tokens."""


class _BegunStep(NamedTuple):
    """A step that was launched. num_known: tokens of each row, known before, that it returns."""

    rows: Sequence[StepRow]
    num_known: Sequence[int]
    tokens: PendingTokens


class DeviceDrafts:
    """Drafts on the device, for sequences whose tokens need nothing from the host."""

    def __init__(self, steps: DeviceSteps, state: BatchState, *, may_fail: bool) -> None:
        """Use steps with room for MAX_IN_FLIGHT of them, and for MAX_NEW_DRAFT_TOKENS of a row.

        may_fail: whether the host can draft where there is no memory. With several ranks the others
        would wait for this one.
        """
        self._steps, self._state, self._may_fail = steps, state, may_fail

    def close(self) -> None:
        """Destroy the graphs; no draft may follow."""
        self._steps.close()

    def update(self, released: Sequence[int], deltas: Sequence[BlockTableDelta]) -> None:
        """Apply the releases and block table deltas of a step."""
        self._steps.update(released, deltas)

    def fits(self, row: DraftRow) -> bool:
        """Return whether the device can draft for a sequence of plain drafts."""
        first = [_first_row(row)]
        is_short = 0 < row.num_draft_tokens <= MAX_IN_FLIGHT
        return is_short and self._fits(StepColumns(first), self._state.states(first))

    def _fits(self, columns: StepColumns, states: Sequence[SequenceState]) -> bool:
        return self._steps.eligibility.reason(columns, states) is None

    def draft(self, rows: Sequence[DraftRow]) -> dict[int, list[int]]:
        """Return the drafts of sequences that fit, by id; none where the host has to make them.

        A draft ends before a token whose logits are invalid. A collective call.
        """
        if not rows:
            return {}
        first = StepColumns([_first_row(row) for row in rows])
        if not self._fits(first, self._state.states(first.rows)):
            return {}
        try:
            begun = self._begin(rows, first)
        except torch.OutOfMemoryError:
            if not self._may_fail:
                raise
            logger.warning("out of memory in drafts of %d sequences on the device", len(rows))
            return {}
        return _collected(rows, begun)

    def _begin(self, rows: Sequence[DraftRow], first: StepColumns) -> list[_BegunStep]:
        """Launch the steps of all draft tokens; a sequence is in as many as it wants."""
        num_known = [row.num_draft_tokens for row in first.rows]
        tokens = self._steps.begin(first, self._state.states(first.rows), num_known)
        begun = [_BegunStep(first.rows, num_known, tokens)]
        for count in range(1, max(row.num_draft_tokens for row in rows)):
            behind = [_pending_row(row, count) for row in rows if row.num_draft_tokens > count]
            tokens = self._steps.begin(StepColumns(behind), self._state.states(behind))
            begun.append(_BegunStep(behind, [0] * len(behind), tokens))
        return begun


def _first_row(row: DraftRow) -> StepRow:
    """Return the row of the tokens that the model lacks, as a draft after the first of them."""
    num_drafts = len(row.token_ids) - 1
    return StepRow(
        row.seq_id,
        row.num_computed_tokens,
        row.token_ids,
        num_drafts,
        samples=True,
        adapter_id=row.adapter_id,
    )


def _pending_row(row: DraftRow, num_drafted: int) -> StepRow:
    position = row.first_index + num_drafted - 1
    pending = (PENDING_TOKEN,)
    return StepRow(row.seq_id, position, pending, 0, samples=True, adapter_id=row.adapter_id)


def _collected(rows: Sequence[DraftRow], begun: Sequence[_BegunStep]) -> dict[int, list[int]]:
    """Wait for the steps; return the draft of each sequence."""
    drafts: dict[int, list[int]] = {row.seq_id: [] for row in rows}
    for place, step in enumerate(begun):
        found = zip(step.rows, step.num_known, step.tokens.collect(), strict=True)
        for row, num_known, token_ids in found:
            draft = drafts[row.seq_id]
            if len(draft) == place:  # else it has ended
                draft += token_ids[num_known : num_known + 1]
    return drafts
