"""The drafts of a step: taken for its rows, ordered after them, or known before it can begin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from specdec.config.engine import EngineConfig
from specdec.engine.metrics.metrics import StepRecorder
from specdec.engine.scheduling.anticipated import Anticipated
from specdec.engine.scheduling.async_scheduling import BegunStep, rows_ahead, schedule_ahead
from specdec.engine.scheduling.decode_run import Rows, repeat_decodes
from specdec.engine.scheduling.drafting import NO_DRAFTING, Drafting
from specdec.engine.scheduling.scheduled_row import ScheduledRow
from specdec.engine.scheduling.scheduler import Scheduler
from specdec.engine.scheduling.speculator import Speculator
from specdec.types.drafts.draft_decision import Decision, DraftAhead


class StepDrafts:
    """Selects the rows of a step that draft, and times their drafts."""

    def __init__(
        self,
        scheduler: Scheduler,
        speculator: Speculator,
        recorder: StepRecorder,
        clock: Callable[[], float],
        config: EngineConfig,
    ) -> None:
        """Set what drafts. recorder: receives the seconds of each draft, by `clock`."""
        self._scheduler = scheduler
        self._speculator = speculator
        self._recorder = recorder
        self._clock = clock
        self._max_model_len = config.max_model_len
        self._max_num_seqs = config.max_num_seqs

    def take(self, rows: list[ScheduledRow], decision: Decision) -> Drafting:
        """Take drafts for the eligible rows, those with room for 0 draft tokens included; time it.

        Where drafts are made ahead, a row without one waits for it only if it is the only row.
        Speculation that is off is free here: without draft tokens to spend the proposer is not
        called, and the scheduler has reserved no KV slot beyond each sequence's next token.
        """
        uses_proposer = decision.num_draft_tokens > 0
        if not uses_proposer:
            if not self._scheduler.has_predictions:
                return NO_DRAFTING
            rows = [row for row in rows if row.num_draft_tokens]  # for predicted output
        if not rows:
            return NO_DRAFTING
        eligible = self._eligible(rows)
        began_at_s = self._clock()
        drafting = self._speculator.take(
            eligible, may_wait=decision.may_wait(len(rows)), uses_proposer=uses_proposer
        )
        seconds = self._clock() - began_at_s
        if any(row.num_draft_tokens for row in eligible):
            self._recorder.record_draft(seconds)
        for work in drafting.work:
            self._recorder.record_ahead(work.began_at_s, work.seconds)
        if drafting.has_waited:
            drafting = replace(drafting, waited_s=seconds)
        return _with_left_out(drafting, eligible, decision)

    def order_ahead(self, rows: Rows, decision: Decision) -> None:
        """Have the draft model go on after the rows that the target runs now."""
        if decision.num_draft_tokens and decision.ahead is not DraftAhead.OFF:
            drafting = [
                (seq, row) for seq, row in rows if self._scheduler.draft_planner.may_draft(seq)
            ]
            self._speculator.ahead(
                drafting,
                self._scheduler.draft_planner.next_chain_length,
                decision.ahead,
                may_wait=decision.may_wait(len(rows)),
            )

    def rows_ahead(self, step: BegunStep, decision: Decision) -> tuple[Rows, Drafting]:
        """Return the rows after the step in flight and their drafts; none if they are unknown."""
        in_flight = step.rows
        if decision.allows_predictions and self._is_predicted(in_flight):
            return [], NO_DRAFTING  # the next drafts depend on the tokens
        if not decision.num_draft_tokens and step.is_whole:
            rows = repeat_decodes(in_flight, self._scheduler, self._max_model_len)
            if rows:
                return rows, NO_DRAFTING
        may_guess = decision.num_draft_tokens and decision.ahead is DraftAhead.OFF
        guessed = self._speculator.guessed(in_flight) if may_guess else None
        rows, drafting = self._planned_ahead(in_flight, decision, guessed)
        if guessed is not None and not rows:
            self._speculator.note_no_guess()
        return rows, drafting

    def _planned_ahead(
        self, in_flight: Rows, decision: Decision, guessed: Mapping[int, tuple[int, ...]] | None
    ) -> tuple[Rows, Drafting]:
        """Return the rows after those in flight, as `rows_ahead` does. guessed: their drafts."""
        anticipated = Anticipated(in_flight)
        scheduled = schedule_ahead(
            in_flight,
            anticipated,
            self._scheduler,
            decision,
            self._speculator.control,
            self._max_model_len,
            holds_drafts=self._speculator.holds_drafts,
            guesses_outcomes=guessed is not None,
        )
        drafting: Drafting | None = NO_DRAFTING
        if scheduled and decision.num_draft_tokens:
            eligible = self._eligible(self._seated(scheduled, in_flight))
            drafting = self._speculator.propose_ahead(eligible, guessed)
            drafting = drafting and _with_left_out(drafting, eligible, decision)
        if drafting is None:
            return [], NO_DRAFTING
        return rows_ahead(scheduled, anticipated, drafting, self._max_model_len), drafting

    def _seated(self, rows: list[ScheduledRow], in_flight: Rows) -> list[ScheduledRow]:
        """Return the rows that a draft model has seats for before the step in flight is committed.

        Until then it keeps the sequences that end with that step, and others may have joined.
        """
        if self._scheduler.num_running <= self._max_num_seqs:
            return rows
        in_flight_ids = {seq.seq_id for seq, _ in in_flight}
        return [row for row in rows if row.seq.seq_id in in_flight_ids]

    def _eligible(self, rows: list[ScheduledRow]) -> list[ScheduledRow]:
        """Return the rows to take drafts for; those of predicted output draft in any case."""
        control, may_draft = self._speculator.control, self._scheduler.draft_planner.may_draft
        return [
            row
            for row in rows
            if row.seq.is_eligible(control) and (row.num_draft_tokens or may_draft(row.seq))
        ]

    def _is_predicted(self, rows: Rows) -> bool:
        """Return whether a sequence of `rows` has drafts of its predicted output.

        By the tokens before the step in flight, so that a lost place is found again while steps
        are begun ahead.
        """
        if not self._scheduler.has_predictions:
            return False
        control = self._speculator.control
        return any(
            seq.prediction is not None
            and seq.is_eligible(control)
            and seq.prediction.has_place(seq.token_ids)
            for seq, _ in rows
        )


def _with_left_out(drafting: Drafting, rows: list[ScheduledRow], decision: Decision) -> Drafting:
    """Return the drafting of `rows` with the draft tokens that the decision leaves out."""
    if decision.slots is None:
        return drafting
    return replace(drafting, num_left_out={row.seq.seq_id: row.num_left_out for row in rows})
