"""Scheduler: which sequences run in a step and with how many tokens."""

from __future__ import annotations

import collections.abc
from bisect import insort
from operator import attrgetter
from typing import NamedTuple

from specdec.config.engine import EngineConfig
from specdec.sequences.block_manager import BlockManager
from specdec.sequences.sequence import Sequence, SequenceStatus
from specdec.speculation.proposers import Proposal
from specdec.text.grammar.matcher import MAX_CONSTRAINED_NODES
from specdec.types.control import NO_SPECULATION, SpeculationControl
from specdec.types.draft_decision import Decision, DecisionReason, DraftShape, chain, tree
from specdec.types.draft_length import draft_budget, share_budget
from specdec.types.draft_survival import share_by_survival
from specdec.types.draft_tree import chain_of, is_chain, num_growth_slots, require_tree
from specdec.types.errors import InvalidValueError, OverloadedError
from specdec.types.messages import StepRow
from specdec.types.stats import Counts


class ScheduledRow(NamedTuple):
    """A sequence's part of a step: its next `num_tokens`, and KV slots for guesses behind them.

    num_next_drafts, next_draft_depth: as in StepRow.
    max_depth: where its draft may be a tree, most draft tokens that follow each other; None for a
        chain.
    """

    seq: Sequence
    num_tokens: int
    num_draft_tokens: int = 0
    num_lookahead_tokens: int = 0
    num_next_drafts: int = 0
    max_depth: int | None = None
    next_draft_depth: int = 0

    @property
    def num_guesses(self) -> int:
        """Draft and lookahead tokens."""
        return self.num_draft_tokens + self.num_lookahead_tokens

    @property
    def draft_depth(self) -> int:
        """Most draft tokens that follow each other."""
        most = self.num_draft_tokens
        return most if self.max_depth is None else min(most, self.max_depth)

    @property
    def samples(self) -> bool:
        """Whether the row reaches the last known token, so that a new token is sampled."""
        return self.num_tokens == self.seq.num_uncomputed_tokens

    def step_row(self, proposal: Proposal | None) -> StepRow:
        """Return the tokens to run: the known ones, then the drafts unless they are stale.

        Raises GrammarError where the sequence's structured output cannot continue.
        """
        seq, start = self.seq, self.seq.num_computed_tokens
        drafts: tuple[int, ...] = ()
        lookahead: tuple[int, ...] = ()
        draft_probs, mask, parents = None, None, None
        if proposal is not None and _continues(proposal, seq):
            drafts, parents = _verifiable(proposal, self.num_draft_tokens, seq)
            lookahead = proposal.lookahead_token_ids[: self.num_lookahead_tokens]
            if proposal.draft_probs is not None:
                draft_probs = proposal.draft_probs[slice(len(drafts))]
        if seq.constraint is not None and self.samples:
            seq.constraint.follow(seq.token_ids)
            if draft_probs is not None:
                constrained = seq.constraint.along(drafts)
            elif parents is not None:
                constrained = seq.constraint.prune(drafts, parents, self.num_draft_tokens)
            else:
                constrained = seq.constraint.extend(drafts, self.num_draft_tokens)
            drafts, mask = constrained.token_ids, constrained.masks
            parents = constrained.parents
        known = tuple(seq.token_ids[start : start + self.num_tokens])
        return StepRow(
            seq.seq_id,
            start,
            known + drafts + lookahead,
            len(drafts),
            self.samples,
            draft_probs,
            mask,
            len(lookahead),
            seq.request.adapter_id,
            parents,
            num_next_drafts=self.num_next_drafts,
            next_draft_depth=self.next_draft_depth,
        )


def _verifiable(
    proposal: Proposal, num_draft_tokens: int, seq: Sequence
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return the first drafts of a proposal, and their tree, as the sequence's verifier takes them.

    Only the coupled verifier walks trees; others get the first path of a tree. Acceptance tests
    token by token, which they use, are defined for one draft at each position.
    """
    drafts = proposal.draft_token_ids[:num_draft_tokens]
    if proposal.parents is None:
        return drafts, None
    assert not proposal.lookahead_token_ids, "a tree with lookahead tokens"
    assert proposal.draft_probs is None, "a tree with draft probabilities"
    parents = proposal.parents[: len(drafts)]
    require_tree(parents)
    if is_chain(parents):
        return drafts, None
    if seq.rules.acting_verifier == "coupled":
        return drafts, parents
    return chain_of(drafts, parents), None


def _continues(proposal: Proposal, seq: Sequence) -> bool:
    """Return whether the proposal was made for the present end; a stale one is never verified."""
    base = (proposal.base_length, proposal.base_token)
    return base == (seq.num_tokens, seq.token_ids[-1])


_by_rank = attrgetter("rank")

_NO_DRAFTS = Decision(chain(0), DecisionReason.OPERATOR)


class Scheduler:
    """Continuous batching: decoding sequences first, then chunked prefill, each by rank.

    When blocks run out, the last sequence in rank is preempted: its blocks are freed and its KV is
    recomputed later. The first in rank can therefore always continue.

    Drafts have a token budget over the whole batch. Slots are reserved for each sequence's own
    number of drafts, once every running sequence has the blocks of its next tokens; no row is
    padded to the longest.
    """

    def __init__(
        self, config: EngineConfig, blocks: BlockManager, counts: Counts | None = None
    ) -> None:
        """Count preemptions and cached tokens in `counts`, the engine's counters."""
        self._config = config
        speculation = config.speculation
        self._length_rule = speculation.length_rule if speculation else None
        self._has_confidences = speculation is not None and speculation.uses_confidences
        self._longest_share = (
            speculation.batch_budget_max if speculation and speculation.batch_budget else None
        )
        self._blocks = blocks
        self._counts = counts or Counts()
        self._waiting: list[Sequence] = []  # by rank
        self._running: list[Sequence] = []  # by rank
        self._rows: dict[int, ScheduledRow] = {}
        self._decision = _NO_DRAFTS
        self._control = NO_SPECULATION
        self._lookahead_window = (
            config.speculation.num_lookahead_tokens if config.speculation else 0
        )
        self._head = config.speculation.head if config.speculation else None
        self._alone: Sequence | None = None
        self.preempted: list[Sequence] = []  # lost their blocks in the last `schedule`
        self.newly_scheduled: list[Sequence] = []  # left the queue for the first time in it

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, sequences: collections.abc.Sequence[Sequence], now_s: float = 0.0) -> None:
        """Queue the choices of a request, for which admission has checked that there is room.

        now_s: when they arrive; their age counts from then.
        """
        num_present = len(self._running) + len(self._waiting)
        most = self._config.max_num_seqs + self._config.max_queue_len
        assert num_present + len(sequences) <= most, "a request was added that has no room"
        for seq in sequences:
            seq.arrival_s = now_s
            insort(self._waiting, seq, key=_by_rank)

    def expired(self, now_s: float) -> list[Sequence]:
        """Return the first choices that never ran and are queued past their deadline.

        Other choices and preempted sequences may wait longer: a request that began is completed.
        """
        return [
            seq
            for seq in self._waiting
            if seq.request.queue_deadline_s <= now_s and seq.choice == 0 and not seq.has_run
        ]

    def preempt_all(self) -> list[Sequence]:
        """Preempt every running sequence, as when the KV cache is lost, and return them."""
        self.preempted = []
        while self._running:
            self._preempt(self._running[-1])
        return self.preempted

    def finish(self, seq: Sequence) -> None:
        """Remove a waiting or running sequence and free its blocks."""
        if seq.status is SequenceStatus.WAITING:
            self._waiting.remove(seq)
        elif seq.status is SequenceStatus.RUNNING:
            self._running.remove(seq)
        seq.status = SequenceStatus.FINISHED
        self._blocks.release(seq.seq_id)

    @property
    def num_decoding(self) -> int:
        """Running sequences of which only the last token is uncomputed."""
        return sum(seq.is_decoding for seq in self._running)

    def num_eligible(self, control: SpeculationControl) -> int:
        """Return how many decoding sequences may have drafts, if the step has any."""
        return sum(seq.is_decoding and seq.is_eligible(control) for seq in self._running)

    def schedule(self, decision: Decision, control: SpeculationControl) -> list[ScheduledRow]:
        """Return the rows of the next step, each with its blocks reserved.

        decision: the number of draft tokens per sequence, for requests that do not choose theirs; 0
            reserves no slot for drafts of any sequence. control: the settings in force.
        """
        self._rows = {}
        self.keep_batch()
        self._decision, self._control = decision, control
        self._schedule_decodes()
        self._plan_guesses()
        planned = self._decodes()
        budget = self._schedule_prefills(self._prefill_budget())
        self._return_guesses(planned)
        self._admit_waiting(budget)
        self._reserve_guesses()
        self._plan_next_drafts()
        return list(self._rows.values())

    def schedule_ahead(self, decision: Decision, control: SpeculationControl) -> list[ScheduledRow]:
        """Return the rows of the step behind the one in flight; none if it depends on that one.

        The running sequences are in the state after the step in flight. Where it has drafts they
        have all been accepted, so that each row has the blocks for its highest position. None is
        preempted, and none is admitted, since blocks that it could share may be published by then.
        Where either would happen, or a row would lose guesses or its next drafts for want of
        blocks, the step cannot be known.
        """
        self._rows = {}
        self._decision, self._control = decision, control
        if self._num_missing_blocks() > self._blocks.num_free_blocks:
            return []
        self._schedule_decodes()
        self._plan_guesses()
        planned = list(self._rows.values())
        budget = self._schedule_prefills(self._prefill_budget())
        has_seat = len(self._running) < self._config.max_num_seqs
        if budget > 0 and self._waiting and has_seat:
            return []
        self._reserve_guesses()
        if list(self._rows.values())[: len(planned)] != planned:
            return []
        return list(self._rows.values()) if self._plan_next_drafts() else []

    def _num_missing_blocks(self) -> int:
        """Return at least how many blocks the next tokens of the running sequences take."""
        num_missing = 0
        for seq in self._running:
            chunk = min(seq.num_uncomputed_tokens, self._config.max_num_batched_tokens)
            num_needed = -(-(seq.num_computed_tokens + chunk) // self._blocks.block_size)
            num_held = len(self._blocks.block_table(seq.seq_id))
            num_missing += max(0, num_needed - num_held)
        return num_missing

    def admit_only(self, seq: Sequence | None) -> None:
        """Let no other waiting sequence join the batch; None admits all again."""
        self._alone = seq

    def keep_batch(self) -> None:
        """Record a step without preempted or new sequences, in place of `schedule`."""
        self.preempted = []
        self.newly_scheduled = []

    def _schedule_decodes(self) -> None:
        """Schedule the next token of each decoding sequence, before any guess takes a block."""
        for seq in [seq for seq in self._running if seq.is_decoding]:
            if seq.status is SequenceStatus.RUNNING:  # not preempted for one that ranks before it
                self._add_row(ScheduledRow(seq, 1))

    def _decodes(self) -> list[ScheduledRow]:
        return [row for row in self._rows.values() if row.seq.is_decoding]

    def _plan_guesses(self, most: int | None = None) -> None:
        """Divide the token budget of guesses among the decoding sequences; blocks come later.

        most: a lower limit of the step's guesses.
        """
        rows = self._decodes()
        num_guesses_left = draft_budget(self._config.max_num_batched_tokens, len(rows))
        if most is not None:
            num_guesses_left = min(num_guesses_left, most)
        wanted = [self._max_draft_tokens(row.seq) for row in rows]
        shares = self._shares([row.seq for row in rows], wanted, num_guesses_left)
        num_left = num_guesses_left - sum(shares)
        for index, (row, share) in enumerate(zip(rows, shares, strict=True)):
            planned = self._decode_row(row.seq, share, num_left // (len(rows) - index))
            num_left -= planned.num_lookahead_tokens
            self._rows[row.seq.seq_id] = planned

    def _return_guesses(self, planned: collections.abc.Sequence[ScheduledRow]) -> None:
        """Divide the guesses of rows that a prompt has preempted among those that remain.

        planned: the rows before. Their guesses are not exceeded: prompts have the other tokens.
        """
        if len(self._decodes()) < len(planned):
            self._plan_guesses(sum(row.num_guesses for row in planned))

    def _shares(
        self, sequences: collections.abc.Sequence[Sequence], wanted: list[int], budget: int
    ) -> list[int]:
        """Divide the draft tokens `wanted`, and at most `budget`, among the sequences.

        Only earlier steps decide, as rejection sampling requires.
        """
        if self._longest_share is None:
            return share_budget(wanted, budget)
        rates = [
            self._acceptance_rates(seq, self._share_limit(seq, count))
            for seq, count in zip(sequences, wanted, strict=True)
        ]
        return share_by_survival(rates, min(budget, sum(wanted)))

    def _acceptance_rates(self, seq: Sequence, limit: int) -> list[float]:
        """Return the rates of `share_by_survival` of at most `limit` draft tokens."""
        draft = seq.head_draft if self._has_confidences and seq.constraint is None else None
        if draft is None or draft.base_length != seq.num_tokens or draft.parents is not None:
            return [seq.acceptance.rate] * limit
        return [seq.confidence.rate(each / 1000) for each in draft.confidences[:limit]]

    def _share_limit(self, seq: Sequence, wanted: int) -> int:
        """Return the most draft tokens of a sequence for which an even share would be `wanted`.

        A number in the request is a limit; without one the draft may be longer than the others.
        """
        assert self._longest_share is not None
        has_own = seq.params.speculation.num_speculative_tokens is not None
        if wanted == 0 or (has_own and self._control.allow_request_override):
            return wanted
        return min(self._longest_share, self._num_useful_guesses(seq))

    def _reserve_guesses(self) -> None:
        """Reserve blocks for the guesses of each row; one that gets none runs without guesses.

        Guesses are optional: no sequence is preempted or kept waiting for their slots.
        """
        for seq_id, row in self._rows.items():
            num_tokens = min(row.seq.num_tokens + row.num_guesses, self._config.max_model_len)
            if row.num_guesses and not self._blocks.reserve(seq_id, num_tokens):
                self._rows[seq_id] = ScheduledRow(row.seq, 1)

    def _plan_next_drafts(self) -> bool:
        """Let the target's head draft for the next step, where it has one, as far as it is useful.

        The draft length of the next step is the present one, or with a batch budget the longest. A
        head with KV runs the tokens that this step yields and its own drafts behind them, in slots
        that no other sequence waits for. Returns whether there were blocks for all of them.
        """
        if self._head is None or self._decision.num_draft_tokens == 0:
            return True
        has_room = True
        for seq_id, row in self._rows.items():
            shape = self._next_draft_shape(row)
            if shape.num_draft_tokens and row.samples and self._head.writes_kv:
                num_slots = row.seq.num_tokens + row.num_draft_tokens + 1 + _num_head_slots(shape)
                num_slots = min(num_slots, self._config.max_model_len)
                if not self._blocks.reserve(seq_id, num_slots):
                    has_room, shape = False, chain(0)
            self._rows[seq_id] = row._replace(
                num_next_drafts=shape.num_draft_tokens,
                next_draft_depth=shape.depth if shape.is_tree else 0,
            )
        return has_room

    def _next_draft_shape(self, row: ScheduledRow) -> DraftShape:
        """Return the shape of the draft that could become output behind the token of a row."""
        assert self._head is not None, "no head drafts"
        if row.seq.drafting_method(self._control) not in (None, self._head.name):
            return chain(0)
        most, useful = self._max_draft_tokens(row.seq), self._num_useful_guesses(row.seq)
        if self._longest_share is not None:  # the next step's share is not known yet
            most = self._share_limit(row.seq, most)
        count = max(0, min(most, useful - 1))
        if not self._may_draft_tree(row.seq):
            return chain(count)
        return tree(count, depth=min(count, self._decision.shape.depth))

    def _decode_row(self, seq: Sequence, num_drafts: int, num_left: int) -> ScheduledRow:
        """Return a row whose lookahead fits into `num_left` guesses; without drafts it has none.

        num_left: this sequence's even share of the guess budget that all drafts have left.
        """
        num_useful = min(num_left, self._num_useful_guesses(seq) - num_drafts)
        num_lookahead = max(0, min(self._lookahead_window, num_useful)) if num_drafts else 0
        max_depth = self._decision.shape.depth if self._may_draft_tree(seq) else None
        return ScheduledRow(seq, 1, num_drafts, num_lookahead, max_depth=max_depth)

    def _prefill_budget(self) -> int:
        """Return how many prompt tokens the step may have beside its decoding sequences."""
        rows = self._rows.values()
        num_taken = sum(row.num_tokens + row.num_guesses for row in rows)
        num_left = self._config.max_num_batched_tokens - num_taken
        limit = self._config.max_prefill_tokens
        return num_left if limit is None or not rows else min(num_left, limit)

    def _schedule_prefills(self, budget: int) -> int:
        for seq in [seq for seq in self._running if not seq.is_decoding]:
            if budget == 0:
                break
            chunk = min(seq.num_uncomputed_tokens, budget)
            row = ScheduledRow(seq, chunk)
            if seq.status is SequenceStatus.RUNNING and self._add_row(row):
                budget -= chunk
        return budget

    def _admit_waiting(self, budget: int) -> None:
        # After a preemption blocks are short: a newly admitted sequence would be preempted next.
        while budget > 0 and not self.preempted:
            seq = next((seq for seq in self._waiting if self._may_join(seq)), None)
            if seq is None or len(self._running) >= self._config.max_num_seqs:
                break
            chunk = self._admit(seq, budget)
            if chunk == 0:
                break
            budget -= chunk

    def _may_join(self, seq: Sequence) -> bool:
        return not seq.waits_for_leader and self._alone in (None, seq)

    def _admit(self, seq: Sequence, budget: int) -> int:
        """Move a waiting sequence into the batch; return its tokens in this step, 0 if it waits."""
        # Log-probabilities of the prompt are not cached: they need its forward pass.
        reuse = not seq.prompt_report.is_due
        cached = self._blocks.admit(seq.seq_id, seq.token_ids, budget, seq.block_keys, reuse=reuse)
        if cached is None:
            return 0
        self._waiting.remove(seq)
        insort(self._running, seq, key=_by_rank)
        seq.status = SequenceStatus.RUNNING
        seq.num_computed_tokens = cached
        if not seq.has_run:
            seq.num_cached_tokens = min(cached, seq.num_prompt_tokens)
            self._counts.num_cached_tokens += seq.num_cached_tokens
            self.newly_scheduled.append(seq)
        seq.has_run = True
        chunk = min(seq.num_uncomputed_tokens, budget)
        self._rows[seq.seq_id] = ScheduledRow(seq, chunk)
        return chunk

    def _add_row(self, row: ScheduledRow) -> bool:
        """Reserve a row's blocks, preempting later sequences; return False if that fails."""
        seq = row.seq
        needed = seq.num_computed_tokens + row.num_tokens
        while not self._blocks.reserve(seq.seq_id, needed):
            last = self._running[-1]
            if last is seq:
                return False
            self._preempt(last)
        self._rows[seq.seq_id] = row
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._running.remove(seq)
        self._rows.pop(seq.seq_id, None)
        self._blocks.release(seq.seq_id)
        seq.status = SequenceStatus.WAITING
        seq.num_computed_tokens = 0
        insort(self._waiting, seq, key=_by_rank)
        self.preempted.append(seq)
        self._counts.num_preemptions += 1

    def _max_draft_tokens(self, seq: Sequence) -> int:
        """Return how many draft tokens step, settings and request allow."""
        if self._decision.num_draft_tokens == 0 or not seq.is_eligible(self._control):
            return 0
        return min(self._wanted_draft_tokens(seq), self._num_useful_guesses(seq))

    def _wanted_draft_tokens(self, seq: Sequence) -> int:
        own = self._own_draft_tokens(seq)
        if own is not None:
            return own
        if not self._may_draft_tree(seq):
            return self._draft_length(seq)
        count = self._decision.num_draft_tokens
        return count if seq.constraint is None else min(count, MAX_CONSTRAINED_NODES)

    def _own_draft_tokens(self, seq: Sequence) -> int | None:
        """Return the number that the request chose, if it may."""
        may_choose = self._control.allow_request_override
        return seq.params.speculation.num_speculative_tokens if may_choose else None

    def _may_draft_tree(self, seq: Sequence) -> bool:
        """Return whether a tree is decided, for a sequence that takes the decision."""
        return (
            self._decision.shape.is_tree
            and seq.rules.acting_verifier == "coupled"
            and self._own_draft_tokens(seq) is None
        )

    def _draft_length(self, seq: Sequence) -> int:
        """Return the step's draft length, or the sequence's own that adapts to acceptance."""
        most, first = self._decision.shape.depth, self._decision.first_length
        if self._length_rule is None:
            return most
        start = most if first is None else first
        seq.draft_length = self._length_rule.begin(seq.draft_length, start)
        return (
            seq.draft_length.num_tokens if first is None else min(most, seq.draft_length.num_tokens)
        )

    def _num_useful_guesses(self, seq: Sequence) -> int:
        """Return how many guesses could still become output, beside a token of the target.

        Of pending drafts none may be accepted; if more are, `StepRow.max_end` cuts held drafts.
        """
        num_tokens = seq.num_tokens - seq.num_pending_drafts
        return max(0, seq.max_length(self._config.max_model_len) - num_tokens - 1)


def _num_head_slots(shape: DraftShape) -> int:
    """Return the KV slots that a head writes behind a sequence while it drafts."""
    if not shape.is_tree:
        return shape.num_draft_tokens
    return num_growth_slots(shape.num_draft_tokens, shape.depth)


def require_room(config: EngineConfig, num_present: int, num_choices: int) -> None:
    """Raise OverloadedError for a request whose choices do not fit into batch and queue now.

    Raises InvalidValueError where they never fit.
    """
    most = config.max_num_seqs + config.max_queue_len
    if num_choices > most:
        limit = f"at most {most} (max_num_seqs and max_queue_len together)"
        raise InvalidValueError("n", num_choices, limit)
    if num_present + num_choices > most:
        count = f"{num_present} of {most} requests run or wait, each choice counted as one"
        raise OverloadedError(f"{count}; this one has {num_choices}")
