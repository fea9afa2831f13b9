"""Drafts that a draft model makes ahead, while the target verifies the ones before.

A round is one row that the target runs. After it the draft model drafts for several outcomes; the
answer is a table that is kept until the text shows which of them has occurred. Drafting ahead needs
no further safety: a draft that continues another text than the present one is never used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from specdec.speculation.proposers.base import AheadWork, DraftRequest, Proposal, SentRow
from specdec.speculation.proposers.cross_vocab.vocab_adapter import VocabAdapter
from specdec.speculation.proposers.outcome_planner import OutcomePlanner, RowPlan, RowSize
from specdec.speculation.proposers.outcome_table import (
    AheadRound,
    AheadTokens,
    Outcome,
    OutcomeTable,
)
from specdec.types.draft_messages import AheadDraft, AheadOutput, AheadRow
from specdec.types.reports.stats import AheadCounts


class _Order(NamedTuple):
    """Rows by sequence, after which the worker was to draft at `sent_at_s`."""

    rows: dict[int, SentRow]
    sent_at_s: float


class _Answer(NamedTuple):
    """The drafts after a row, and the passes that made them."""

    table: OutcomeTable
    work: AheadWork


class AheadDrafts:
    """The rounds after which a draft model drafts, and the tables of those before."""

    def __init__(self, adapter: VocabAdapter, clock: Callable[[], float]) -> None:
        """clock: monotonic, in seconds."""
        self.counts = AheadCounts()
        self.planner = OutcomePlanner(clock)
        self._adapter = adapter
        self._clock = clock
        self._expected: dict[int, _Order] = {}  # by step
        self._rounds: dict[int, AheadRound] = {}  # whose outcome is not counted yet
        self._tables: dict[int, _Answer] = {}  # by sequence, the last

    @property
    def is_used(self) -> bool:
        """Return whether there may be drafts to take."""
        return bool(self._expected or self._tables)

    @property
    def is_expected(self) -> bool:
        """Return whether an answer of the worker is to come."""
        return bool(self._expected)

    def plan(self, rows: Sequence[SentRow]) -> list[RowPlan]:
        """Return what to draft after each of the rows."""
        if not rows:
            return []
        sizes = [RowSize(len(row.draft_token_ids), row.num_next_tokens) for row in rows]
        return self.planner.plan(sizes, rows[0].ahead, may_wait=rows[0].may_wait)

    def begin_step(self, step_id: int, rows: Iterable[tuple[SentRow, AheadRow]]) -> None:
        """Record that the worker drafts after rows, and answers by the id of the step."""
        sent = {row.seq.seq_id: row for row, _ in rows}
        self._expected[step_id] = _Order(sent, self._clock())
        for seq_id, row in sent.items():
            self._rounds[seq_id] = _round_of(row)
        self.planner.begin_step()

    def end_step(self, *, is_lost: bool) -> None:
        """Record that the target has run the step after which the worker drafts, or lost it."""
        self.planner.end_step(is_lost=is_lost)

    def receive(self, outputs: Iterable[AheadOutput]) -> None:
        """Keep the answers of the worker as tables, each in place of the one before."""
        for output in outputs:
            order = self._expected.pop(output.step_id)
            work = AheadWork(order.sent_at_s, sum(each.seconds for each in output.passes))
            self.planner.observe_passes(output.passes, output.share)
            self.counts.busy_s += work.seconds
            for draft in output.rows:
                if draft.seq_id in order.rows:
                    table = self._table(order.rows[draft.seq_id], draft)
                    self._tables[draft.seq_id] = _Answer(table, work)

    def take(self, requests: Iterable[DraftRequest]) -> list[Proposal]:
        """Return the drafts that continue the texts of requests; none for the others."""
        proposals = []
        for request in requests:
            seq, answer = request.seq, self._tables.get(request.seq.seq_id)
            if answer is None or request.max_tokens <= 0:
                continue
            found = answer.table.continuing(seq.token_ids)
            if found is not None:
                tokens = found.token_ids[: request.max_tokens]
                probs = None if found.draft_probs is None else found.draft_probs[: len(tokens)]
                base = seq.seq_id, seq.num_tokens, seq.token_ids[-1]
                proposals.append(Proposal(*base, tokens, probs, work=answer.work))
                self.counts.num_used_tokens += len(tokens)
        return proposals

    def count(self, requests: Iterable[DraftRequest], served: set[int]) -> None:
        """Count the outcomes of the last rounds of sequences. served: those that have a draft."""
        for request in requests:
            seq_id = request.seq.seq_id
            round_ = self._rounds.pop(seq_id, None)
            outcome = None if round_ is None else round_.outcome(request.seq.token_ids)
            if round_ is None or outcome is None:
                continue
            answer = self._tables.get(seq_id)
            self._observe(round_, outcome, None if answer is None else answer.table)
            if request.max_tokens > 0:
                self.counts.record(outcome.num_accepted, hit=seq_id in served)

    def release(self, seq_id: int) -> None:
        """Drop the drafts of a sequence, those that are to come included."""
        self._tables.pop(seq_id, None)
        self._rounds.pop(seq_id, None)
        for order in self._expected.values():
            order.rows.pop(seq_id, None)

    def _observe(self, round_: AheadRound, outcome: Outcome, table: OutcomeTable | None) -> None:
        rank, num_tried = None, 0
        if table is not None and table.round == round_:
            rank, num_tried = table.rank(outcome), table.num_tried(outcome.num_accepted)
        outcomes = self.planner.outcomes
        outcomes.observe(len(round_.drafts), outcome.num_accepted, rank, num_tried)

    def _table(self, row: SentRow, draft: AheadDraft) -> OutcomeTable:
        entries = []
        for each in draft.continuations:
            drafted = (each.token_id, *each.draft_token_ids)
            token_ids = self._adapter.to_target(row.seq, drafted, len(drafted))
            if not token_ids:
                continue
            token_id, *others = token_ids
            probs = None if each.draft_probs is None else each.draft_probs[: len(others)]
            outcome = Outcome(each.num_accepted, token_id)
            entries.append((outcome, AheadTokens(tuple(others), probs)))
            self.counts.num_tokens += len(others)
        return OutcomeTable.of(_round_of(row), entries)


def _round_of(row: SentRow) -> AheadRound:
    return AheadRound(row.base_length, row.draft_token_ids)
