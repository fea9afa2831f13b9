"""The steps of a target that its device runs: begun one behind the other, collected in order."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from specdec.types.messages import StepRow, VerifiedRow, VerifyOutput
from specdec.worker import device_rows
from specdec.worker.batch_state import SequenceState
from specdec.worker.device_buffers import PendingTokens
from specdec.worker.device_steps import MAX_IN_FLIGHT, DeviceSteps
from specdec.worker.head_runner import HeadRunner

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _BegunStep:
    """A step that the device runs; its rows may be pending.

    states: of the sequences of its rows, which may have been released meanwhile. by_host: ids of
    those whose rows the host verifies.
    """

    step_id: int
    rows: Sequence[StepRow]
    states: Sequence[SequenceState]
    tokens: PendingTokens
    by_host: frozenset[int]


class DeviceQueue:
    """Begins steps on the device, and turns their results into outputs."""

    def __init__(self, steps: DeviceSteps, head: HeadRunner | None, *, may_fail: bool) -> None:
        """head: drafts at the end of each step.

        may_fail: whether a step that finds no memory can be run by the host. With several ranks the
        others would wait for this one.
        """
        self._steps, self._head, self._may_fail = steps, head, may_fail
        self._begun: deque[_BegunStep] = deque()

    def __len__(self) -> int:
        return len(self._begun)

    @property
    def is_full(self) -> bool:
        """Return whether as many steps are in flight as there may be."""
        return len(self._begun) == MAX_IN_FLIGHT

    @property
    def is_done(self) -> bool:
        """Return whether the oldest step has ended."""
        return self._begun[0].tokens.is_done

    def waits_for(self, released: Iterable[int]) -> bool:
        """Return whether the release of sequences has to wait for the steps in flight.

        A head records these steps by sequence when they are collected.
        """
        if self._head is None or not self._begun:
            return False
        running = {row.seq_id for step in self._begun for row in step.rows}
        return not running.isdisjoint(released)

    def begin(self, step_id: int, rows: Sequence[StepRow], states: Sequence[SequenceState]) -> bool:
        """Begin a step behind those in flight; return False where the device cannot run it."""
        if not self._can_run(rows, states):
            return False
        try:
            if self._head is not None:
                self._head.prepare_device_step()
            tokens = self._steps.begin(rows, states)
        except torch.OutOfMemoryError:
            if not self._may_fail:
                raise
            logger.warning("out of memory in a step of %d sequences on the device", len(rows))
            return False
        by_host = verified_by_host(rows, states)
        self._begun.append(_BegunStep(step_id, rows, states, tokens, by_host))
        return True

    def _can_run(self, rows: Sequence[StepRow], states: Sequence[SequenceState]) -> bool:
        """Return whether the device can run a step behind that in flight, and draft behind it."""
        in_front = self._begun[-1].rows if self._begun else ()
        fits_head = self._head is None or (
            self._head.fits_device(rows, in_front) and not verified_by_host(rows, states)
        )
        return fits_head and self._steps.can_run(rows, states)

    def collect(self) -> VerifyOutput:
        """Wait for the oldest step in flight; return its output without the rows of the host.

        The states of the sequences in it then have its tokens.
        """
        step = self._begun.popleft()
        rows, verified = [], []
        tokens, drafted = step.tokens.collect(), step.tokens.drafts()
        notes = zip(step.tokens.logprobs(tokens), step.tokens.confidences(drafted), strict=True)
        found = zip(step.rows, step.states, tokens, drafted, notes, strict=True)
        for pending, state, token_ids, drafts, (logprobs, confidences) in found:
            row = state.resolved(pending) if pending.is_pending else pending
            rows.append(row)
            if row.seq_id in step.by_host:
                continue
            if row.samples:
                state.append_output(row, token_ids)
                state.held_draft = drafts if self._head is not None else ()
                verified.append(
                    VerifiedRow(
                        row.seq_id,
                        token_ids,
                        logprobs,
                        has_bad_logits=not token_ids,
                        next_draft_token_ids=drafts,
                        next_draft_confidences=confidences,
                    )
                )
            elif not token_ids:
                verified.append(VerifiedRow(row.seq_id, (), has_bad_logits=True))
        if self._head is not None:
            self._head.note_device_step(rows, tuple(verified))
        return VerifyOutput(step.step_id, tuple(verified))

    def clear(self) -> None:
        """Drop the steps in flight; none may follow."""
        self._begun.clear()


def verified_by_host(rows: Sequence[StepRow], states: Sequence[SequenceState]) -> frozenset[int]:
    """Return the ids of the sequences whose rows the host has to verify."""
    pairs = zip(rows, states, strict=True)
    return frozenset(row.seq_id for row, state in pairs if device_rows.verified_by_host(row, state))
