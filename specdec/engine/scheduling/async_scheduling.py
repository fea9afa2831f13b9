"""The steps in flight on the target, and asynchronous scheduling.

Asynchronous scheduling makes the rows of the next step before the tokens of this one are known. As
in vLLM and SGLang, a worker that already has its next step does not wait while the engine
commits this one. After a step without drafts, everything about the next step is known except the
tokens, and those the worker has; an n-gram lookup supplies a draft for each. After a step with
drafts of a head, the worker also has the positions and the next drafts; after one with drafts of a
suffix lookup, drafts for likely outcomes, where they pay (`AheadGain`). If a token ends its
sequence, the result of that sequence's next row is discarded. Waiting sequences join a step that is
begun ahead as they join any other; `Scheduler.schedule_ahead` and `schedule_beside` decide which.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import NamedTuple

from specdec.engine.metrics.metrics import StepRecorder
from specdec.engine.scheduling.anticipated import Anticipated
from specdec.engine.scheduling.decode_run import PENDING, RepeatedDecodes, Rows, sent_rows
from specdec.engine.scheduling.drafting import Drafting
from specdec.engine.scheduling.scheduled_row import ScheduledRow
from specdec.engine.scheduling.scheduler import Scheduler
from specdec.engine.scheduling.state_saves import Save, begin_saves
from specdec.sequences.block_manager import BlockManager
from specdec.sequences.sequence import HeadDraft, Sequence, SequenceStatus
from specdec.sequences.worker_view import WorkerView
from specdec.speculation.proposers import ProposalAhead
from specdec.types.control import SpeculationControl
from specdec.types.drafters import CONFIGURED_VERSION
from specdec.types.drafts.draft_decision import Decision
from specdec.types.errors import GrammarError
from specdec.types.messages import (
    PLAIN_DRAFTING,
    RowDrafting,
    StepInput,
    StepRow,
    VerifyOutput,
    head_drafting,
)
from specdec.types.ranks import Target


class StepTime(NamedTuple):
    """Seconds of a step of the target.

    idle_s: since the result before it, without any step; None where it began while another ran.
    """

    seconds: float
    idle_s: float | None


class BegunStep(NamedTuple):
    """A step that the target runs.

    head_version: of the head that drafts at its end. idle_s: as in StepTime. is_whole: whether no
    row was dropped, which the target still has.
    """

    rows: Rows
    began_at_s: float
    head_version: int
    saves: tuple[Save, ...]
    idle_s: float | None
    is_whole: bool = True


class CollectedStep(NamedTuple):
    """A step that the target has run."""

    rows: Rows
    output: VerifyOutput
    head_version: int
    saves: tuple[Save, ...]
    time: StepTime


class StepsInFlight:
    """The steps that the target runs, timed, and its view of their sequences.

    head_version: of the head that drafts at the end of the steps that begin from now on.
    """

    def __init__(
        self,
        target: Target,
        blocks: BlockManager,
        recorder: StepRecorder,
        clock: Callable[[], float],
        *,
        needs_tokens: bool = False,
        has_adapters: bool = False,
    ) -> None:
        """Start with no step. recorder: receives the seconds of each step, by `clock`.

        needs_tokens: whether the target needs the tokens of every sequence. has_adapters: whether
        sequences may have adapters; the rows of each adapter are then sent next to each other.
        """
        self.target = target
        self.head_version = CONFIGURED_VERSION
        self._blocks = blocks
        self._recorder = recorder
        self._clock = clock
        self._has_adapters = has_adapters
        self._admission = attrgetter("admission_with_tokens" if needs_tokens else "admission")
        self._worker = WorkerView(blocks, self._admission)
        self._steps: deque[BegunStep] = deque()  # oldest first
        self._collected_at_s = -math.inf

    def __len__(self) -> int:
        return len(self._steps)

    def drop(self, seq: Sequence) -> None:
        """Discard the rows of a sequence, which may be admitted again before they are collected."""
        for index, step in enumerate(self._steps):
            if not isinstance(step.rows, RepeatedDecodes):
                rows = [(each, row) for each, row in step.rows if each is not seq]
                is_whole = step.is_whole and len(rows) == len(step.rows)
                self._steps[index] = step._replace(rows=rows, is_whole=is_whole)

    @property
    def oldest(self) -> BegunStep:
        """The oldest step."""
        return self._steps[0]

    @property
    def rows(self) -> Rows:
        """The rows of the oldest step."""
        return self._steps[0].rows

    @property
    def sequences(self) -> list[Sequence]:
        """The running sequences of all steps, each once."""
        rows = (row for step in self._steps for row in step.rows)
        running = {seq.seq_id: seq for seq, _ in rows if seq.status is SequenceStatus.RUNNING}
        return list(running.values())

    def replace_target(self, target: Target) -> None:
        """Continue with a target that has no state; the steps in flight are dropped."""
        self.target = target
        self.head_version = CONFIGURED_VERSION
        self._steps.clear()
        self._worker = WorkerView(self._blocks, self._admission)

    def begin(self, step_id: int, rows: Rows) -> None:
        """Send the target a step, with what changed about its sequences."""
        changing: Iterable[Sequence]
        if isinstance(rows, RepeatedDecodes):
            assert rows.follows(self._steps[-1].rows), "a step repeats another one than the last"
            changing = rows.unknown
        else:
            if self._has_adapters:
                rows = sorted(rows, key=lambda each: each[1].adapter_id)
            block_size = self._blocks.block_size
            changing = (seq for seq, row in rows if _may_change(row, block_size))
        delta = self._worker.update(changing)
        saves = begin_saves(rows, delta.admitted, self._blocks)
        saved = tuple([(seq.seq_id, snapshot) for seq, snapshot in saves])
        step = StepInput(step_id, *delta, sent_rows(rows), saves=saved)
        now_s = self._clock()
        idle_s = None if self._steps else now_s - self._collected_at_s
        self._steps.append(BegunStep(rows, now_s, self.head_version, saves, idle_s))
        self.target.begin(step)

    def collect(self) -> CollectedStep:
        """Wait for the oldest step and return its rows and results."""
        verified = self.target.collect()
        rows, began_at_s, head_version, saves, idle_s, _ = self._steps.popleft()
        # A step that began while another ran is timed from the end of that one.
        began_at_s, self._collected_at_s = max(began_at_s, self._collected_at_s), self._clock()
        time = StepTime(self._collected_at_s - began_at_s, idle_s)
        self._recorder.record_verify(time.seconds)
        return CollectedStep(rows, verified, head_version, saves, time)

    def head_drafts(self) -> dict[int, HeadDraft]:
        """Return what the ranks have drafted for the rows of the oldest step, by sequence."""
        return {seq.seq_id: seq.head_draft for seq, _ in self.rows if seq.head_draft is not None}

    def resolve(self) -> None:
        """Put what the step before has yielded into the rows of the step in flight.

        The ranks do the same. Only they need the token of a row without drafts whose position was
        known. Rows of sequences that have ended stay pending: they are discarded.
        """
        if not self._steps or isinstance(self._steps[0].rows, RepeatedDecodes):
            return
        step = self._steps[0]
        if any(_is_open(seq, row) for seq, row in step.rows):
            self._steps[0] = step._replace(rows=[_resolved(seq, row) for seq, row in step.rows])

    def release(self, seq_id: int) -> None:
        """Have the target drop a sequence with the next step."""
        self._worker.release(seq_id)

    def release_ending(self, max_model_len: int) -> None:
        """Release the sequences that end with the oldest step: others have their seats."""
        for seq_id in ending_by_length(self.rows, max_model_len):
            self.release(seq_id)

    def truncate(self, seq_id: int) -> None:
        """Record that a sequence's block table has become shorter."""
        self._worker.truncate(seq_id)


def _may_change(row: StepRow, block_size: int) -> bool:
    """Return whether a rank may lack something about a row's sequence.

    It knows a sequence with a row in the step before, and all blocks of that row.
    """
    return (
        not row.is_pending
        or row.num_computed_tokens % block_size == 0
        or row.drafting is not PLAIN_DRAFTING
    )


def schedule_ahead(
    in_flight: Rows,
    anticipated: Anticipated,
    scheduler: Scheduler,
    decision: Decision,
    control: SpeculationControl,
    max_model_len: int,
    *,
    holds_drafts: bool,
    guesses_outcomes: bool = False,
) -> list[ScheduledRow]:
    """Return the rows after those in flight; none where they are not known yet.

    anticipated: of the rows in flight. holds_drafts: whether the drafts after drafts are held by
        the target's ranks. guesses_outcomes: whether they may be guessed.
    """
    follows_drafts = holds_drafts or guesses_outcomes
    if not _are_predictable(in_flight, max_model_len, follows_drafts=follows_drafts):
        return []
    ending = ending_by_length(in_flight, max_model_len)
    with anticipated:
        rows = scheduler.schedule_ahead(decision, control, ending, holds_trees=holds_drafts)
        if any(row.num_draft_tokens and not row.seq.num_pending for row in rows):
            return []  # drafts for a sequence outside the step in flight continue a known text
    assert not _are_too_deep(rows, in_flight), "a change of settings is followed by a known step"
    return rows


def _are_too_deep(rows: list[ScheduledRow], in_flight: Rows) -> bool:
    """Return whether a tree after a row in flight is deeper than the one that is wanted of it.

    A device takes its first nodes, as many as are wanted, and cuts no depth.
    """
    trees = [row for row in rows if row.num_draft_tokens > row.draft_depth]
    made = {row.seq_id: row.drafting.next_depth for _, row in in_flight} if trees else {}
    return any(row.draft_depth < made.get(row.seq.seq_id, 0) for row in trees)


def rows_ahead(
    scheduled: list[ScheduledRow], anticipated: Anticipated, drafting: Drafting, max_model_len: int
) -> Rows:
    """Return the rows to send; none where the grammar of one cannot continue."""
    try:
        with anticipated:
            return [
                (row.seq, _row_ahead(row, drafting.ahead.get(row.seq.seq_id), max_model_len))
                for row in scheduled
            ]
    except GrammarError:
        return []  # it is reported when the step is scheduled again


def _are_predictable(in_flight: Rows, max_model_len: int, *, follows_drafts: bool) -> bool:
    """Return whether the next row of each sequence depends on what the target's ranks have alone.

    A grammar needs the token for the mask of the next position. Of rows with guesses the engine
    does not know how many tokens they yield. A chunk of a prompt yields none. What follows a
    thinking budget depends on the text.
    """
    return not any(
        seq.status is SequenceStatus.RUNNING
        and row.samples
        and (
            seq.constraint is not None
            or (row.num_guesses and not follows_drafts)
            or seq.reaches_budget(1 + row.draft_depth, max_model_len)
        )
        for seq, row in in_flight
    )


def ending_by_length(in_flight: Rows, max_model_len: int) -> set[int]:
    """Return the ids of the running sequences that certainly end with their pending tokens.

    A row with guesses is not certain to yield a token: it is retried after bad logits.
    """
    ending = set()
    if isinstance(in_flight, RepeatedDecodes):
        ending = {seq.seq_id for seq in in_flight.run.ending(in_flight.place)}
        in_flight = in_flight.others
    return ending | {
        seq.seq_id
        for seq, row in in_flight
        if seq.status is SequenceStatus.RUNNING
        and row.samples
        and len(seq.token_ids) >= seq.open_length
        and not row.num_guesses
        and seq.num_tokens + 1 >= seq.max_length(max_model_len)
    }


def _row_ahead(row: ScheduledRow, proposal: ProposalAhead | None, max_model_len: int) -> StepRow:
    """Return the row of an anticipated sequence. Raises GrammarError where it cannot continue."""
    seq = row.seq
    if not seq.num_pending:
        return row.step_row(None)
    return StepRow(
        seq.seq_id,
        seq.num_computed_tokens,
        PENDING,
        0,
        True,
        _drafting_ahead(row, proposal),
        None,
        0,
        seq.request.adapter_id,
        seq.open_length or seq.max_length(max_model_len) - 1,
    )


def _drafting_ahead(row: ScheduledRow, proposal: ProposalAhead | None) -> RowDrafting:
    if proposal is None and not any(row.next_drafting):
        return PLAIN_DRAFTING
    proposal = proposal or ProposalAhead(row.seq.seq_id)
    head = (proposal.num_held_drafts, proposal.held_depth, *row.next_drafting)
    if not proposal.drafts_by_token:
        return head_drafting(*head)
    return RowDrafting(None, None, proposal.drafts_by_token, *head)


def _is_open(seq: Sequence, row: StepRow) -> bool:
    """Return whether drafts or the position of a row depended on the step before."""
    return row.drafting is not PLAIN_DRAFTING or row.num_computed_tokens >= len(seq.token_ids)


def _resolved(seq: Sequence, row: StepRow) -> tuple[Sequence, StepRow]:
    if not row.is_pending or seq.status is not SequenceStatus.RUNNING:
        return seq, row
    draft = seq.head_draft
    held = (draft.token_ids, draft.parents) if draft else ((), None)
    return seq, row.resolved(seq.num_tokens - 1, seq.token_ids[-1], *held)
