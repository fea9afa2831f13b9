"""Scheduler: which sequences run in a step and with how many tokens."""

from __future__ import annotations

import collections.abc
from bisect import insort
from collections.abc import Iterable, Set
from itertools import islice
from operator import attrgetter

from specdec.config.engine import EngineConfig
from specdec.engine.scheduling.adapter_seats import AdapterSeats
from specdec.engine.scheduling.batch_load import BatchLoad
from specdec.engine.scheduling.blocks_ahead import completed_keys, have_blocks, lacks_block
from specdec.engine.scheduling.draft_planner import DraftPlanner
from specdec.engine.scheduling.scheduled_row import ScheduledRow
from specdec.sequences.block_manager import BlockKey, BlockManager
from specdec.sequences.sequence import Sequence, SequenceStatus
from specdec.types.control import SpeculationControl
from specdec.types.drafts.draft_decision import Decision, PromptLoad, chain
from specdec.types.reports.stats import Counts

_by_rank = attrgetter("rank")


class Scheduler:
    """Continuous batching: decoding sequences first, then chunked prefill, each by rank.

    When blocks run out, the last sequence in rank is preempted: its blocks are freed and its KV is
    recomputed later. The first in rank can therefore always continue.

    `DraftPlanner` divides the guesses of a step. Their slots are reserved once every running
    sequence has the blocks of its next tokens.
    """

    def __init__(
        self,
        config: EngineConfig,
        blocks: BlockManager,
        counts: Counts | None = None,
        seats: AdapterSeats | None = None,
    ) -> None:
        """Count preemptions and cached tokens in `counts`, the engine's counters.

        seats: limit of the adapters in a batch; None where no sequence has one.
        """
        self._config = config
        self.draft_planner = DraftPlanner(config)
        self.blocks = blocks
        self._counts = counts or Counts()
        self._seats = seats
        self._waiting: list[Sequence] = []  # by rank
        self._running: list[Sequence] = []  # by rank
        self.load = BatchLoad()
        self.batch = 0  # another number whenever a sequence joins or leaves the running ones
        self.num_admitted_tokens = 0  # of prompts, without cached ones
        self._rows: dict[int, ScheduledRow] = {}
        self._alone: Sequence | None = None
        self.preempted: list[Sequence] = []  # lost their blocks in the last `schedule`
        self.newly_scheduled: list[Sequence] = []  # left the queue for the first time in it

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def may_grow(self) -> bool:
        """Return whether a sequence waits while there is a seat."""
        return self.num_waiting > 0 and self._has_seat()

    @property
    def has_adapters(self) -> bool:
        """Return whether sequences may have adapters."""
        return self._seats is not None

    @property
    def has_predictions(self) -> bool:
        """Return whether any running sequence has predicted output."""
        return self.load.num_predicted > 0

    def add(self, sequences: list[Sequence], now_s: float = 0.0) -> None:
        """Queue the choices of a request, which arrive at `now_s`. Raises OverloadedError."""
        self._config.require_room(self.num_running + self.num_waiting, len(sequences))
        for seq in sequences:
            seq.arrive(now_s)
            insort(self._waiting, seq, key=_by_rank)

    def expired(self, now_s: float) -> list[Sequence]:
        """Return the first choices that never ran and are queued past their deadline.

        Other choices and preempted sequences may wait longer: a request that began is completed.
        """
        late = (seq for seq in self._waiting if seq.request.queue_deadline_s <= now_s)
        return [seq for seq in late if seq.choice == 0 and not seq.has_run]

    def preempt_all(self) -> list[Sequence]:
        """Preempt every running sequence, as when the KV cache is lost, and return them."""
        self.preempted = []
        while self._running:
            self.preempt(self._running[-1])
        return self.preempted

    def finish(self, seq: Sequence) -> None:
        """Remove a waiting or running sequence and free its blocks."""
        if seq.status is SequenceStatus.WAITING:
            self._waiting.remove(seq)
        elif seq.status is SequenceStatus.RUNNING:
            self._leave(seq)
        seq.status = SequenceStatus.FINISHED
        self.blocks.release(seq.seq_id)

    @property
    def num_decoding(self) -> int:
        """Running sequences of which only the last token is uncomputed."""
        return len(self._running) - len(self.load.prefilling)

    def num_eligible(self, control: SpeculationControl) -> int:
        """Return how many decoding sequences may have drafts, if the step has any."""
        return self.num_decoding - self.load.num_ineligible(control)

    @property
    def prompts(self) -> PromptLoad:
        """The prompts that the next steps can run beside the decoding sequences."""
        config, num_running = self._config, len(self._running)
        most = max(0, config.max_num_batched_tokens - num_running)
        if config.max_prefill_tokens is not None:
            most = min(most, config.max_prefill_tokens)
        waiting: Iterable[Sequence] = self._waiting
        if self._seats is not None:  # one without a seat may wait for long
            waiting = self._seats.that_may_join(waiting, self._running)
        joining = islice(waiting, max(0, config.max_num_seqs - num_running))
        return self.load.prompts(joining, self.blocks.num_free_slots, most)

    def schedule(self, decision: Decision, control: SpeculationControl) -> list[ScheduledRow]:
        """Return the rows of the next step, each with its blocks reserved.

        decision: the draft length of a sequence, for requests that do not choose theirs; 0
            reserves no slot for drafts, except for predicted output where it allows that.
        control: the settings in force.
        """
        self._rows = {}
        self.preempted = []
        self.draft_planner.begin_step(decision, control, has_predictions=self.has_predictions)
        self._schedule_decodes(self._running)
        self._plan_guesses()
        if self._waiting or len(self._rows) < len(self._running):
            self._schedule_prompts()
        self._reserve_guesses()
        self._reserve_next_drafts()
        return list(self._rows.values())

    def _schedule_prompts(self) -> None:
        """Give prompts what the decoding sequences leave of the budget."""
        planned = list(self._rows.values())
        budget = self._schedule_prefills(self._running, self._prefill_budget())
        self._return_guesses(planned)
        self._admit_waiting(budget)

    def schedule_ahead(
        self,
        decision: Decision,
        control: SpeculationControl,
        ending: Set[int],
        *,
        holds_trees: bool,
    ) -> list[ScheduledRow]:
        """Return the rows of the step after the one in flight; none if it depends on that one.

        The running sequences are in the state after the step in flight. Where it has drafts they
        have all been accepted, so that each row has the blocks for its highest position. Waiting
        sequences are admitted, unless one could share a block that the step in flight completes.
        Where that is so, or a sequence would be preempted, or a row would lose guesses or its next
        drafts for want of blocks, the step cannot be known; nor where a tree may be drafted that
        the target's ranks do not hold. Sequences that were admitted until then stay in the batch.

        ending: the sequences that end with the step in flight. They have no row, and their seats
            are free; their blocks are not. holds_trees: whether the ranks hold trees.
        """
        self._rows = {}
        self.draft_planner.begin_step(decision, control)
        if not holds_trees and self.draft_planner.may_draft_trees(self._running):
            return []
        staying = [seq for seq in self._running if seq.seq_id not in ending]
        if not have_blocks(staying, self.blocks, self._config.max_num_batched_tokens):
            return []
        self._schedule_decodes(staying)
        self._plan_guesses()
        planned = list(self._rows.values())
        if not self._schedule_prompts_ahead(self._running, ending):
            return []
        self._reserve_guesses()
        is_as_planned = list(self._rows.values())[: len(planned)] == planned
        is_known = is_as_planned and self._reserve_next_drafts()
        return list(self._rows.values()) if is_known else []

    def schedule_beside(
        self, num_decodes: int, changing: collections.abc.Sequence[Sequence], ending: Set[int]
    ) -> list[ScheduledRow] | None:
        """Return the rows of prompts beside decodes that go on, as in `schedule_ahead`, or None.

        changing: the sequences that need a block, compute a prompt, or are `ending`.
        """
        self._rows = {}
        going_on = [seq for seq in changing if seq.seq_id not in ending]
        if not have_blocks(going_on, self.blocks, self._config.max_num_batched_tokens):
            return None
        for seq in going_on:
            if seq.is_decoding:
                self.blocks.reserve(seq.seq_id, seq.num_tokens)
                if not seq.num_pending:  # the last token of a prompt
                    self._rows[seq.seq_id] = ScheduledRow(seq, 1)
        is_known = self._schedule_prompts_ahead(changing, ending, num_decodes)
        return list(self._rows.values()) if is_known else None

    def _schedule_prompts_ahead(
        self, running: Iterable[Sequence], ending: Set[int], num_decodes: int = 0
    ) -> bool:
        """Schedule prompts; return False where one may share a block that is in flight."""
        budget = self._schedule_prefills(running, self._prefill_budget(num_decodes))
        if budget <= 0 or not self._waiting or not self._has_seat(ending):
            return True
        return self._admit_waiting(budget, ending, completed_keys(running, self.blocks))

    def admit_only(self, seq: Sequence | None) -> None:
        """Let no other waiting sequence join the batch; None admits all again."""
        self._alone = seq

    def keep_batch(self) -> None:
        """Begin a step without preempted or new sequences; `schedule` and admissions add theirs."""
        self.preempted, self.newly_scheduled = [], []
        self.load.begin_step()

    def _schedule_decodes(self, running: Iterable[Sequence]) -> None:
        """Schedule the next token of each decoding sequence, before any guess takes a block."""
        block_size, rows = self.blocks.block_size, self._rows
        for seq in [seq for seq in running if seq.is_decoding]:
            if seq.num_computed_tokens % block_size:  # its last block has room
                rows[seq.seq_id] = ScheduledRow(seq, 1)
            elif seq.status is SequenceStatus.RUNNING:  # not preempted for one that ranks before it
                self._add_row(ScheduledRow(seq, 1))

    def _decodes(self) -> list[ScheduledRow]:
        return [row for row in self._rows.values() if row.seq.is_decoding]

    def _plan_guesses(self, most: int | None = None) -> None:
        """Divide the budget of guesses among the decoding sequences; blocks come later.

        most: a lower limit of the step's guesses.
        """
        if not self.draft_planner.may_have_guesses:
            return
        for row in self.draft_planner.plan([row.seq for row in self._decodes()], most):
            self._rows[row.seq.seq_id] = row

    def _return_guesses(self, planned: collections.abc.Sequence[ScheduledRow]) -> None:
        """Divide the guesses of rows that a prompt has preempted among those that remain.

        planned: the rows before. Their guesses are not exceeded: prompts have the other tokens.
        """
        if len(self._decodes()) < len(planned):
            self._plan_guesses(sum(row.num_guesses for row in planned))

    def _reserve_guesses(self) -> None:
        """Reserve blocks for the guesses of each row; one that gets none runs without guesses.

        Guesses are optional: no sequence is preempted or kept waiting for their slots.
        """
        if not self.draft_planner.may_have_guesses:
            return
        for seq_id, row in self._rows.items():
            num_tokens = min(row.seq.num_tokens + row.num_guesses, self._config.max_model_len)
            if row.num_guesses and not self.blocks.reserve(seq_id, num_tokens):
                self._rows[seq_id] = ScheduledRow(row.seq, 1)

    def _reserve_next_drafts(self) -> bool:
        """Let the target's ranks draft for the next step, where they do, as far as it is useful.

        Its slots are optional too. Returns whether there were blocks for all of them.
        """
        if not self.draft_planner.has_next_drafts:
            return True
        has_room = True
        for seq_id, row in self._rows.items():
            shape = self.draft_planner.next_draft_shape(row)
            num_slots = self.draft_planner.num_slots_of_next_draft(row, shape)
            if num_slots and not self.blocks.reserve(seq_id, num_slots):
                has_room, shape = False, chain(0)
            self._rows[seq_id] = row.with_next_draft(shape, self.draft_planner.next_lookup(row))
        return has_room

    def _prefill_budget(self, num_decodes: int = 0) -> int:
        """Return how many prompt tokens a step may have beside scheduled rows and other decodes."""
        rows = self._rows.values()
        num_taken = num_decodes + sum(row.num_tokens + row.num_guesses for row in rows)
        num_left = self._config.max_num_batched_tokens - num_taken
        limit = self._config.max_prefill_tokens
        return num_left if limit is None or not num_taken else min(num_left, limit)

    def _schedule_prefills(self, sequences: Iterable[Sequence], budget: int) -> int:
        """Schedule those of the sequences that compute a prompt; return what is left."""
        for seq in sorted([seq for seq in sequences if not seq.is_decoding], key=_by_rank):
            if budget == 0:
                break
            if seq.status is SequenceStatus.RUNNING:
                row = ScheduledRow.of_prompt(seq, budget, self.blocks.snapshots)
                budget -= row.num_tokens if self._add_row(row) else 0
        return budget

    def _has_seat(self, ending: Set[int] = frozenset()) -> bool:
        return len(self._running) - len(ending) < self._config.max_num_seqs

    def _admit_waiting(
        self, budget: int, ending: Set[int] = frozenset(), in_flight: Set[BlockKey] = frozenset()
    ) -> bool:
        """Admit waiting sequences; return False at the first one that lacks a block `in_flight`."""
        # After a preemption blocks are short: a newly admitted sequence would be preempted next.
        while budget > 0 and not self.preempted and self._has_seat(ending):
            seq = self._next_to_admit(ending)
            if seq is None:
                break
            if lacks_block(seq, self.blocks, in_flight):
                return False
            chunk = self._admit(seq, budget)
            if chunk == 0:
                break
            budget -= chunk
        return True

    def _next_to_admit(self, ending: Set[int]) -> Sequence | None:
        candidates = (seq for seq in self._waiting if self._may_join(seq))
        if self._seats is None:
            return next(candidates, None)
        staying = (seq for seq in self._running if seq.seq_id not in ending)
        return self._seats.first(candidates, staying)

    def _may_join(self, seq: Sequence) -> bool:
        return not seq.waits_for_leader and self._alone in (None, seq)

    def _admit(self, seq: Sequence, budget: int) -> int:
        """Move a waiting sequence into the batch; return its tokens in this step, 0 if it waits."""
        # Log-probabilities of the prompt are not cached: they need its forward pass.
        reuse = seq.prompt_report is None
        cached = self.blocks.admit(seq.seq_id, seq.token_ids, budget, seq.block_keys, reuse=reuse)
        if cached is None:
            return 0
        self._waiting.remove(seq)
        insort(self._running, seq, key=_by_rank)
        self.batch += 1
        seq.status, seq.num_computed_tokens = SequenceStatus.RUNNING, cached
        seq.snapshot = self.blocks.resumption(seq.seq_id)
        if not seq.has_run:
            seq.num_cached_tokens = min(cached, seq.num_prompt_tokens)
            self._counts.num_cached_tokens += seq.num_cached_tokens
            self.num_admitted_tokens += seq.num_prompt_tokens - seq.num_cached_tokens
            self.newly_scheduled.append(seq)
        seq.has_run = True
        self.load.join(seq)
        if self._seats is not None:
            self._seats.admitted(seq)
        row = self._rows[seq.seq_id] = ScheduledRow.of_prompt(seq, budget, self.blocks.snapshots)
        return row.num_tokens

    def _add_row(self, row: ScheduledRow) -> bool:
        """Reserve a row's blocks, preempting later sequences; return False if that fails."""
        seq = row.seq
        while not self.blocks.reserve(seq.seq_id, seq.num_computed_tokens + row.num_tokens):
            last = self._running[-1]
            if last is seq:
                return False
            self.preempt(last)
        self._rows[seq.seq_id] = row
        return True

    def _leave(self, seq: Sequence) -> None:
        """Remove a sequence from the batch."""
        self._running.remove(seq)
        self.load.leave(seq)
        self.batch += 1

    def preempt(self, seq: Sequence) -> None:
        """Free the blocks of a running sequence, which is then computed again."""
        self.requeue(seq)
        self.preempted.append(seq)
        self._counts.num_preemptions += 1

    def readmit(self, seq: Sequence) -> None:
        """Give a sequence its seat back after `requeue`, if enough blocks are free."""
        self._admit(seq, 1)

    def requeue(self, seq: Sequence) -> None:
        """Free the blocks of a running sequence, for another reason than a lack of them."""
        self._leave(seq)
        self._rows.pop(seq.seq_id, None)
        self.blocks.release(seq.seq_id)
        seq.status, seq.num_computed_tokens = SequenceStatus.WAITING, 0
        insort(self._waiting, seq, key=_by_rank)
