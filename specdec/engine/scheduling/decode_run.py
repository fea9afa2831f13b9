"""Steps that go on with the decodes of the step in flight, a token later each, beside other rows.

With speculation off most rows are such, and scheduling costs what changes: sequences that end leave
the run, and those that have computed their prompts join it.
"""

from __future__ import annotations

import collections.abc
import math
from collections.abc import Iterator, Set
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeGuard

from specdec.engine.scheduling.anticipated import Anticipated, Row
from specdec.engine.scheduling.scheduler import Scheduler
from specdec.sequences.decode_rows import RepeatedRows, SampledTokens
from specdec.sequences.sequence import Sequence, SequenceStatus
from specdec.types.errors import GrammarError
from specdec.types.messages import PENDING_TOKEN, PLAIN_DRAFTING, StepRow, VerifiedRow

Rows = collections.abc.Sequence[Row]

_status = attrgetter("status")

PENDING = (PENDING_TOKEN,)
"""The tokens of a row after one in flight."""


class DecodeRun:
    """Sequences that decode one token a step without guesses or grammar, in the order of rows.

    Its steps are counted by place. last_places: of each sequence, that of the step with which it
    ends by its length. at_edge: sequences by the remainder of the places where they begin a block.
    batch: see Scheduler; the one that the run was last compared with.
    """

    def __init__(
        self, sequences: list[Sequence], last_places: list[int], at_edge: list[list[Sequence]]
    ) -> None:
        self.sequences, self.batch = sequences, -1
        self.seq_ids = tuple([seq.seq_id for seq in sequences])
        self.request_ids = tuple([seq.request.request_id for seq in sequences])
        self._last_places, self._at_edge = last_places, at_edge
        self._next_end = min(last_places, default=math.inf)

    def ends_at(self, place: int) -> bool:
        """Return whether a sequence ends by its length with the step at a place."""
        return place >= self._next_end

    @cached_property
    def streams_tokens(self) -> bool:
        """Return whether outputs are tokens alone, and end by length or end-of-sequence token."""
        return all(seq.streams_tokens and seq.open_length for seq in self.sequences)

    def ending(self, place: int) -> list[Sequence]:
        """Return the running sequences that end by their length with the step at a place."""
        ends = zip(self.sequences, self._last_places, strict=True)
        return [seq for seq, last in ends if last <= place and _is_running(seq)]

    def growing(self, place: int) -> list[Sequence]:
        """Return the sequences that need another block in the step at a place."""
        return self._at_edge[place % len(self._at_edge)]

    def changed(self, left: Set[int], joined: Rows, place: int) -> DecodeRun:
        """Return the run without sequences that left, and with those of rows at a place."""
        if not left and not joined:
            return self
        sequences = [seq for seq in self.sequences if seq.seq_id not in left]
        ends = zip(self.seq_ids, self._last_places, strict=True)
        last_places = [last for seq_id, last in ends if seq_id not in left]
        at_edge = [[seq for seq in each if seq.seq_id not in left] for each in self._at_edge]
        for seq, row in joined:
            assert seq.open_length in (0, row.max_end), "`streams_on` compares no lengths"
            sequences.append(seq)
            last_places.append(place + row.max_end - row.end)
            at_edge[(place - row.num_computed_tokens) % len(at_edge)].append(seq)
        return DecodeRun(sequences, last_places, at_edge)


class RepeatedDecodes(collections.abc.Sequence[Row]):
    """The rows of a step, first those of a run. Their tokens stay pending: only ranks need them.

    rows: as they are sent. others: those after the ones of the run.
    """

    def __init__(
        self, run: DecodeRun, rows: collections.abc.Sequence[StepRow], others: Rows = ()
    ) -> None:
        self.run, self.rows, self.others = run, rows, others
        self.place = rows.num_steps if isinstance(rows, RepeatedRows) else 0

    @property
    def unknown(self) -> list[Sequence]:
        """The sequences of which a rank may lack something."""
        return [*self.run.growing(self.place), *(seq for seq, _ in self.others)]

    def follows(self, rows: Rows) -> bool:
        """Return whether they are those of the step after one with `rows`, as a rank takes them."""
        if self.place == 0:  # sent in full
            return True
        return self.place == 1 + (rows.place if isinstance(rows, RepeatedDecodes) else 0)

    def yields(self, verified: collections.abc.Sequence[VerifiedRow]) -> TypeGuard[SampledTokens]:
        """Return whether a result is a token of each row that samples, in their order."""
        return isinstance(verified, SampledTokens) and verified.seq_ids == self._sampling

    @property
    def _sampling(self) -> tuple[int, ...]:
        seq_ids = self.run.seq_ids
        if self.others:
            seq_ids += tuple(row.seq_id for _, row in self.others if row.samples)
        return seq_ids

    def streams_on(self, token_ids: tuple[int, ...], eos_token_ids: Set[int]) -> bool:
        """Return whether the output of each sequence of the run is its token, and it goes on."""
        run = self.run
        if run.ends_at(self.place) or not run.streams_tokens:
            return False
        if not eos_token_ids.isdisjoint(token_ids):
            return False
        statuses = [*map(_status, run.sequences)]
        return statuses.count(SequenceStatus.RUNNING) == len(statuses)

    def __len__(self) -> int:
        return len(self.run.sequences) + len(self.others)

    def __iter__(self) -> Iterator[Row]:
        yield from zip(self.run.sequences, self.rows, strict=False)
        yield from self.others

    def __getitem__(self, index: Any) -> Any:
        return [*self][index]


class _Following:
    """The rows that can follow a step in flight.

    left: ids of sequences whose rows are not repeated. ending: sequences that end by their length.
    in_flight: rows of running sequences that are not of the run. joined: those of them that are
    repeated from now on. decodes: new rows, which can be repeated later. num_running: running
    sequences with a row in flight.
    """

    def __init__(self, before: RepeatedDecodes, batch: int, max_model_len: int) -> None:
        run = before.run
        self.left: set[int] = set()
        if batch != run.batch:
            self.left = {seq.seq_id for seq in run.sequences if not _is_running(seq)}
        self.num_running = len(run.sequences) - len(self.left)
        self.ending = run.ending(before.place) if run.ends_at(before.place) else []
        self.left.update([seq.seq_id for seq in self.ending])
        self.in_flight: list[Row] = []
        self.joined: list[Row] = []
        self.decodes: list[Row] = []
        for seq, row in before.others:
            if not _is_running(seq):
                self.left.add(seq.seq_id)
                continue
            self.num_running += 1
            self.in_flight.append((seq, row))
            self._add(seq, row, seq.max_length(max_model_len))

    def _add(self, seq: Sequence, row: StepRow, max_length: int) -> None:
        if row.samples and row.end + 1 < max_length:
            if row.is_pending and row.drafting is PLAIN_DRAFTING:
                self.joined.append((seq, row))
                return
            self.decodes.append((seq, _decode_after(row, max_length - 1)))
        elif row.samples:
            self.ending.append(seq)
        self.left.add(seq.seq_id)

    @property
    def is_known(self) -> bool:
        """Return whether no row depends on tokens that only the target knows."""
        if any(seq.thinking_budget is not None for seq in self.ending):
            return False
        return not any(
            row.num_guesses or (row.samples and seq.constraint is not None)
            for seq, row in self.in_flight
        )

    def keeps_order(self, before: RepeatedDecodes, num_waiting: int) -> bool:
        """Return whether rows next to each other in flight surely stay so."""
        is_one_kind = len(self.in_flight) in (len(self.joined), len(self.decodes))
        return is_one_kind and not before.run.sequences and not num_waiting

    def changing(self, growing: collections.abc.Iterable[Sequence]) -> list[Row]:
        """Return the rows in flight of sequences that change, `growing` of the run among them."""
        of_run = [*(seq for seq in growing if seq.seq_id not in self.left), *self.ending]
        listed = {seq.seq_id for seq, _ in self.in_flight}
        decodes = [
            (seq, StepRow(seq.seq_id, seq.num_computed_tokens, PENDING, 0, True))
            for seq in of_run
            if seq.seq_id not in listed
        ]
        return decodes + self.in_flight


def repeat_decodes(in_flight: Rows, scheduler: Scheduler, max_model_len: int) -> Rows:
    """Return the rows after a step without guesses; none where they are not found here.

    Those that `schedule_ahead` and `rows_ahead` would find, at the cost of what changes.
    """
    before, blocks = in_flight, scheduler.blocks
    if not isinstance(before, RepeatedDecodes):
        run = DecodeRun([], [], [[] for _ in range(blocks.block_size)])
        before = RepeatedDecodes(run, [row for _, row in in_flight], in_flight)
    run = before.run
    is_whole = run.batch == scheduler.batch and len(run.sequences) == scheduler.num_running
    if not is_whole or before.others or run.ends_at(before.place) or scheduler.may_grow:
        return _changed_rows(before, scheduler, max_model_len)
    growing = run.growing(before.place + 1)
    if len(growing) > blocks.num_free_blocks:
        return []
    for seq in growing:
        has_room = blocks.reserve(seq.seq_id, seq.num_tokens + 1)
        assert has_room, "a token takes more than one block"
    return RepeatedDecodes(run, RepeatedRows.after(before.rows))


def _changed_rows(before: RepeatedDecodes, scheduler: Scheduler, max_model_len: int) -> Rows:
    """Return the rows after those of `before` where sequences leave or join, or may."""
    following = _Following(before, scheduler.batch, max_model_len)
    if following.num_running != scheduler.num_running or not following.is_known:
        return []
    if scheduler.has_adapters and not following.keeps_order(before, scheduler.num_waiting):
        return []
    run, left, place = before.run, following.left, before.place
    run = run.changed(left, following.joined, place)
    decodes = following.decodes
    num_decodes = len(run.sequences) + len(decodes)
    changing = following.changing(before.run.growing(place + 1))
    if not num_decodes:
        return []
    with Anticipated(changing):
        ending = {seq.seq_id for seq in following.ending}
        rows = scheduler.schedule_beside(num_decodes, [seq for seq, _ in changing], ending)
        if rows is None:
            return []
        try:
            others = [*decodes, *((row.seq, row.step_row(None)) for row in rows)]
        except GrammarError:
            return []  # it is reported when the step is scheduled again
    run.batch = scheduler.batch
    joining = tuple([row for _, row in others])
    if not run.sequences:
        return RepeatedDecodes(run, joining, others)
    return RepeatedDecodes(run, RepeatedRows.after(before.rows, tuple(left), joining), others)


def sent_rows(rows: Rows) -> collections.abc.Sequence[StepRow]:
    """Return the rows as the target receives them."""
    return rows.rows if isinstance(rows, RepeatedDecodes) else tuple(row for _, row in rows)


def _is_running(seq: Sequence) -> bool:
    return seq.status is SequenceStatus.RUNNING


def _decode_after(row: StepRow, max_end: int) -> StepRow:
    """Return the row of the token that a row yields."""
    return StepRow(
        row.seq_id, row.end, PENDING, 0, True, PLAIN_DRAFTING, None, 0, row.adapter_id, max_end
    )
