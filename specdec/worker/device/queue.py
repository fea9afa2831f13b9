"""The steps of a target that its device runs: begun one after the other, collected in order."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.types.messages import StepInput, StepRow, VerifiedRow, VerifyOutput
from specdec.worker.batch.batch_state import SequenceState
from specdec.worker.device.eligibility import verified_by_host
from specdec.worker.device.input.buffers import PendingTokens
from specdec.worker.device.input.columns import StepColumns
from specdec.worker.device.steps import MAX_IN_FLIGHT, DeviceSteps
from specdec.worker.head.drafter import RankDrafter

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


@dataclass(frozen=True)
class _Result:
    """Result of a step: its rows without pending tokens, and the new tokens of each."""

    rows: Sequence[StepRow]
    verified: tuple[VerifiedRow, ...]


class DeviceQueue:
    """Begins steps on the device, and turns their results into outputs.

    A step is collected when its result is needed, and settled when the states of its sequences get
    this result. How far each rank has collected depends on its time. So that several ranks know the
    same when they begin a step, they settle at places in the order of messages alone.
    """

    def __init__(
        self, steps: DeviceSteps, drafter: RankDrafter | None, group: TensorParallelGroup
    ) -> None:
        """drafter: drafts at the end of each step. group: of the ranks that run the same steps."""
        self._steps, self._drafter = steps, drafter
        # Whether a step that finds no memory can be run by the host: other ranks would wait for it,
        # and one that has changed states cannot be run twice.
        self._may_fail = group.size == 1 and not steps.has_states
        self._settles_late = group.size > 1
        self._begun: deque[_BegunStep] = deque()  # and not settled
        self._collected: _Result | None = None  # of the first of them

    @property
    def num_in_flight(self) -> int:
        """Steps that were not collected."""
        return len(self._begun) - (self._collected is not None)

    @property
    def num_unsettled(self) -> int:
        """Steps whose results the states of their sequences lack."""
        return len(self._begun)

    @property
    def is_done(self) -> bool:
        """Return whether the oldest step in flight has ended."""
        return self._begun[self._collected is not None].tokens.is_done

    def waits_for(self, released: Iterable[int]) -> bool:
        """Return whether the release of sequences has to wait for the steps in flight.

        The drafter records these steps by sequence when they are settled.
        """
        if self._drafter is None or not self._begun:
            return False
        running = {row.seq_id for step in self._begun for row in step.rows}
        return not running.isdisjoint(released)

    def needs_results(self, step: StepInput) -> bool:
        """Return whether all steps in flight have to be collected before a step begins.

        Of several ranks, all have to know those results or none: a step with pending tokens begins
        without them, and others with them, whether they have arrived or not. One rank uses what it
        has.
        """
        if not self._settles_late:
            return False
        self._settle_all_but_last()
        return not any(row.is_pending for row in step.rows) or self.waits_for(step.released)

    def has_room(self, step: StepInput) -> bool:
        """Return whether a step may begin after those in flight, whose results it may need."""
        if self.needs_results(step):
            if self.num_in_flight:
                return False
            self.settle()
        return len(self._begun) < MAX_IN_FLIGHT and not self.waits_for(step.released)

    def begin(self, step_id: int, rows: Sequence[StepRow], states: Sequence[SequenceState]) -> bool:
        """Begin a step after those in flight; return False where the device cannot run it."""
        columns = StepColumns(rows)
        preceding = self._begun[-1].rows if self._begun else ()
        if self._steps.eligibility.reason(columns, states, self._drafter, preceding) is not None:
            return False
        try:
            if self._drafter is not None:
                self._drafter.prepare_device_step()
            tokens = self._steps.begin(columns, states)
        except torch.OutOfMemoryError:
            if not self._may_fail:
                raise
            logger.warning("out of memory in a step of %d sequences on the device", len(rows))
            return False
        by_host = verified_by_host(rows, states)
        self._begun.append(_BegunStep(step_id, rows, states, tokens, by_host))
        return True

    def collect(self) -> VerifyOutput:
        """Wait for the oldest step in flight; return its output without the rows of the host."""
        self.settle()
        step = self._begun[0]
        self._collected = result = self._result(step)
        if not self._settles_late:
            self.settle()
        return VerifyOutput(step.step_id, result.verified)

    def collect_settled(self) -> VerifyOutput:
        """Collect the oldest step, which the states of its sequences know then."""
        output = self.collect()
        self.settle()
        return output

    def settle(self) -> None:
        """Give the states of sequences the result of the step that was collected last, if any."""
        if (result := self._collected) is None:
            return
        self._collected, step = None, self._begun.popleft()
        verified = {row.seq_id: row for row in result.verified}
        for row, state in zip(result.rows, step.states, strict=True):
            if row.samples and row.seq_id not in step.by_host:
                own = verified[row.seq_id]
                state.append_output(row, own.token_ids)
                state.hold_draft(own)
        if self._drafter is not None:
            self._drafter.note_device_step(result.rows, result.verified)

    def _settle_all_but_last(self) -> None:
        """Settle the step that was collected, unless it is the last one."""
        if len(self._begun) > 1:
            self.settle()

    def _result(self, step: _BegunStep) -> _Result:
        """Wait for a step, after which all before it are settled."""
        rows, verified = [], []
        tokens, drafted = step.tokens.collect(), step.tokens.drafts()
        notes = zip(
            step.tokens.logprobs(tokens),
            step.tokens.parents(drafted),
            step.tokens.confidences(drafted),
            step.tokens.lookups(drafted),
            strict=True,
        )
        found = zip(step.rows, step.states, tokens, drafted, notes, strict=True)
        for pending, state, token_ids, drafts, notes_of_row in found:
            logprobs, parents, confidences, is_lookup = notes_of_row
            row = state.resolved(pending) if pending.is_pending else pending
            rows.append(row)
            if row.seq_id in step.by_host:
                continue
            if row.samples:
                verified.append(
                    VerifiedRow(
                        row.seq_id,
                        token_ids,
                        logprobs,
                        has_bad_logits=not token_ids,
                        next_draft_token_ids=drafts,
                        next_draft_parents=parents,
                        next_draft_confidences=confidences,
                        next_draft_is_lookup=is_lookup,
                    )
                )
            elif not token_ids:
                verified.append(VerifiedRow(row.seq_id, (), has_bad_logits=True))
        return _Result(rows, tuple(verified))

    def clear(self) -> None:
        """Drop the steps in flight; none may follow."""
        self._begun.clear()
        self._collected = None
