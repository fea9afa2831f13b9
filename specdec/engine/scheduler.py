"""Decides which sequences run in a step, with how many tokens, and who must wait."""

from __future__ import annotations

import collections.abc
from bisect import insort
from operator import attrgetter
from typing import NamedTuple

from specdec.config.engine import EngineConfig
from specdec.sequences.block_manager import BlockManager
from specdec.sequences.sequence import Sequence, SequenceStatus
from specdec.speculation.proposers import Proposal
from specdec.types.adaptive_length import draft_budget, share_budget
from specdec.types.draft_decision import Decision, DecisionReason, chain
from specdec.types.errors import InvalidValueError, OverloadedError
from specdec.types.messages import StepRow


class ScheduledRow(NamedTuple):
    """A sequence's part in a step: its next `num_tokens`, and room for guesses behind them."""

    seq: Sequence
    num_tokens: int
    num_draft_tokens: int = 0
    num_lookahead_tokens: int = 0

    @property
    def samples(self) -> bool:
        """Whether this row reaches the end of what is known, so that a new token follows."""
        return self.num_tokens == self.seq.num_uncomputed_tokens

    def step_row(self, proposal: Proposal | None) -> StepRow:
        """The tokens to run: known ones, then the drafts if they continue what is known.

        Raises GrammarError where the sequence's structured output cannot go on.
        """
        seq, start = self.seq, self.seq.num_computed_tokens
        drafts: tuple[int, ...] = ()
        lookahead: tuple[int, ...] = ()
        draft_probs, mask = None, None
        if proposal is not None and _continues(proposal, seq):
            drafts = proposal.draft_token_ids[: self.num_draft_tokens]
            lookahead = proposal.lookahead_token_ids[: self.num_lookahead_tokens]
            if proposal.draft_probs is not None:
                draft_probs = proposal.draft_probs[slice(len(drafts))]
        if seq.constraint is not None and self.samples:
            seq.constraint.follow(seq.token_ids)
            if draft_probs is None:
                constrained = seq.constraint.extend(drafts, self.num_draft_tokens)
            else:
                constrained = seq.constraint.along(drafts)
            drafts, mask = constrained.token_ids, constrained.masks
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
        )


def _continues(proposal: Proposal, seq: Sequence) -> bool:
    """Whether a proposal was made for the sequence's present end; a stale one never is verified."""
    base = (proposal.base_length, proposal.base_token)
    return base == (seq.num_tokens, seq.token_ids[-1])


_by_rank = attrgetter("rank")

_NO_DRAFTS = Decision(chain(0), DecisionReason.OPERATOR)


class Scheduler:
    """Continuous batching: decoding sequences first, then prefill in chunks, each by rank.

    When blocks run out the last in rank is preempted: it gives up its blocks and is computed again
    later from its tokens. The first can therefore always go on.

    Drafts have a budget of their own over the batch, and take slots only for the tokens that each
    may have: nothing is padded to the longest.
    """

    def __init__(self, config: EngineConfig, blocks: BlockManager) -> None:
        self._config = config
        self._length_rule = config.speculation.length_rule if config.speculation else None
        self._blocks = blocks
        self._waiting: list[Sequence] = []  # by rank
        self._running: list[Sequence] = []  # by rank
        self._rows: dict[int, ScheduledRow] = {}
        self._decision = _NO_DRAFTS
        self._lookahead_window = (
            config.speculation.num_lookahead_tokens if config.speculation else 0
        )
        self._preempted: list[Sequence] = []
        self._begun: list[Sequence] = []
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self.heeds_requests = True

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, sequences: collections.abc.Sequence[Sequence]) -> None:
        """Queues the choices of a request; raises what `require_room` raises, and queues none."""
        require_room(self._config, len(self._running) + len(self._waiting), len(sequences))
        for seq in sequences:
            insort(self._waiting, seq, key=_by_rank)

    def expired(self, now_s: float) -> list[Sequence]:
        """First choices that have never run and whose time to wait is over.

        The others may wait longer: what has begun is brought to its end.
        """
        return [
            seq
            for seq in self._waiting
            if seq.request.queue_deadline_s <= now_s and seq.choice == 0 and not seq.has_run
        ]

    def preempt_all(self) -> list[Sequence]:
        """Takes every running sequence out of the batch, as when its KV is lost."""
        self._preempted = []
        while self._running:
            self._preempt(self._running[-1])
        return self._preempted

    def finish(self, seq: Sequence) -> None:
        """Takes a sequence out, wherever it is, and frees its blocks."""
        if seq.status is SequenceStatus.WAITING:
            self._waiting.remove(seq)
        elif seq.status is SequenceStatus.RUNNING:
            self._running.remove(seq)
        seq.status = SequenceStatus.FINISHED
        self._blocks.release(seq.seq_id)

    @property
    def num_decoding(self) -> int:
        """Running sequences of which only the last token is left to run."""
        return sum(seq.is_decoding for seq in self._running)

    @property
    def num_willing(self) -> int:
        """Those of them that drafts may be made for, if the step has any."""
        return sum(seq.is_decoding and self.may_draft(seq) for seq in self._running)

    def may_draft(self, seq: Sequence) -> bool:
        """Whether neither a sequence's request nor what came of its drafts speaks against them."""
        return seq.may_draft and not (self.heeds_requests and seq.declines_drafts)

    def schedule(self, decision: Decision) -> list[ScheduledRow]:
        """The rows of the next step; every one has its blocks reserved.

        decision: what a sequence may draft unless its request says otherwise; with 0 draft tokens
        nobody drafts.
        """
        self._rows = {}
        self._preempted = []
        self._begun = []
        self._decision = decision
        budget = self._schedule_decodes(self._config.max_num_batched_tokens)
        if self._rows and self._config.max_prefill_tokens is not None:
            budget = min(budget, self._config.max_prefill_tokens)
        budget = self._schedule_prefills(budget)
        self._admit_waiting(budget)
        return list(self._rows.values())

    @property
    def is_closed(self) -> bool:
        """Whether nobody could join the batch before somebody leaves it."""
        return not self._waiting or len(self._running) >= self._config.max_num_seqs

    def go_on(self) -> None:
        """In place of `schedule`, where a step goes on with those that run."""
        self._preempted = []
        self._begun = []

    @property
    def preempted(self) -> list[Sequence]:
        """The sequences that lost their blocks in the last `schedule`."""
        return self._preempted

    @property
    def begun(self) -> list[Sequence]:
        """The sequences that left the queue for the first time in the last `schedule`."""
        return self._begun

    def _schedule_decodes(self, budget: int) -> int:
        decoding = [seq for seq in self._running if seq.is_decoding]
        num_guesses_left = draft_budget(budget, len(decoding))
        wanted = [self._max_draft_tokens(seq) for seq in decoding]
        shares = share_budget(wanted, num_guesses_left)
        num_left = num_guesses_left - sum(shares)
        for index, (seq, share) in enumerate(zip(decoding, shares, strict=True)):
            if seq.status is not SequenceStatus.RUNNING:
                continue  # preempted for an older one, just now
            row = self._decode_row(seq, share, num_left // (len(decoding) - index))
            num_guesses = row.num_draft_tokens + row.num_lookahead_tokens
            # Guesses are optional: nobody is preempted for their slots.
            if num_guesses and not self._blocks.reserve(seq.seq_id, seq.num_tokens + num_guesses):
                row, num_guesses = ScheduledRow(seq, 1), 0
            if self._add_row(row):
                num_left -= row.num_lookahead_tokens
                budget -= 1 + num_guesses
        return budget

    def _decode_row(self, seq: Sequence, num_drafts: int, num_left: int) -> ScheduledRow:
        """Who gets no drafts does not look ahead; who does keeps to an even share of what is left.

        num_left: guesses that the drafts of all have left for this sequence.
        """
        num_useful = min(num_left, self._num_useful_guesses(seq) - num_drafts)
        num_lookahead = max(0, min(self._lookahead_window, num_useful)) if num_drafts else 0
        return ScheduledRow(seq, 1, num_drafts, num_lookahead)

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
        # After a preemption blocks are short: whoever came in now would be the next to go.
        while budget > 0 and not self._preempted:
            seq = next((seq for seq in self._waiting if not seq.is_held_back), None)
            if seq is None or len(self._running) >= self._config.max_num_seqs:
                break
            chunk = self._admit(seq, budget)
            if chunk == 0:
                break
            budget -= chunk

    def _admit(self, seq: Sequence, budget: int) -> int:
        """Puts a waiting sequence into the batch; its tokens in this step, 0 if it must wait."""
        # Cached KV would not tell how likely the prompt's tokens were.
        known = [] if seq.prompt_report.is_due else seq.token_ids
        cached = self._blocks.attach(seq.seq_id, known, seq.request.cache_salt)
        chunk = min(seq.num_tokens - cached, budget)
        if not self._blocks.reserve(seq.seq_id, cached + chunk):
            self._blocks.release(seq.seq_id)
            return 0
        self._waiting.remove(seq)
        insort(self._running, seq, key=_by_rank)
        seq.status = SequenceStatus.RUNNING
        seq.num_computed_tokens = cached
        if not seq.has_run:
            seq.num_cached_tokens = min(cached, seq.num_prompt_tokens)
            self.num_cached_tokens += seq.num_cached_tokens
            self._begun.append(seq)
        seq.has_run = True
        self._rows[seq.seq_id] = ScheduledRow(seq, chunk)
        return chunk

    def _add_row(self, row: ScheduledRow) -> bool:
        """Reserves a row's blocks, preempting later sequences for them; False if that fails."""
        seq = row.seq
        num_guesses = row.num_draft_tokens + row.num_lookahead_tokens
        needed = seq.num_computed_tokens + row.num_tokens + num_guesses
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
        self._preempted.append(seq)
        self.num_preemptions += 1

    def _max_draft_tokens(self, seq: Sequence) -> int:
        """What the step and the request allow."""
        if self._decision.num_draft_tokens == 0 or not self.may_draft(seq):
            return 0
        count = seq.params.speculation.num_speculative_tokens
        if count is None or not self.heeds_requests:
            count = self._draft_length(seq)
        return min(count, self._num_useful_guesses(seq))

    def _draft_length(self, seq: Sequence) -> int:
        """The step's number of draft tokens, or what the sequence's acceptance made of it."""
        most, first = self._decision.num_draft_tokens, self._decision.first_length
        if self._length_rule is None:
            return most
        start = most if first is None else first
        seq.draft_length = self._length_rule.begin(seq.draft_length, start)
        return (
            seq.draft_length.num_tokens if first is None else min(most, seq.draft_length.num_tokens)
        )

    def _num_useful_guesses(self, seq: Sequence) -> int:
        """How many tokens behind the last could still be kept, with one of the target's own."""
        room = self._config.max_model_len - seq.num_tokens
        if seq.max_tokens is not None:
            room = min(room, seq.max_tokens - seq.num_output_tokens)
        return max(0, room - 1)


def require_room(config: EngineConfig, num_present: int, num_choices: int) -> None:
    """Refuses a request whose choices do not fit beside the sequences that run or wait.

    Raises OverloadedError, and InvalidValueError where they would never fit.
    """
    most = config.max_num_seqs + config.max_queue_len
    if num_choices > most:
        limit = f"at most {most} (max_num_seqs and max_queue_len together)"
        raise InvalidValueError("n", num_choices, limit)
    if num_present + num_choices > most:
        count = f"{num_present} of {most} requests run or wait, each choice counted as one"
        raise OverloadedError(f"{count}; this one has {num_choices}")
