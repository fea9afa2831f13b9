"""Steps of the same decodes, one after the other: each repeats the one before, a token later."""

from __future__ import annotations

import collections.abc
from collections.abc import Iterator
from typing import Any, TypeGuard

from specdec.sequences.decode_rows import RepeatedRows, SampledTokens
from specdec.sequences.sequence import Sequence
from specdec.types.messages import PENDING_TOKEN, PLAIN_DRAFTING, StepRow, VerifiedRow

Rows = collections.abc.Sequence[tuple[Sequence, StepRow]]


class DecodeRun:
    """All running sequences, each of which decodes one token a step without guesses or grammar.

    batch: see Scheduler; the run ends with it. rows: of the first step. num_steps: most steps; a
    sequence ends by its length with the last of them.
    """

    def __init__(self, in_flight: Rows, batch: int, block_size: int, max_model_len: int) -> None:
        """in_flight: the rows of the step before the first one."""
        self.sequences = [seq for seq, _ in in_flight]
        self.batch = batch
        lengths = [seq.max_length(max_model_len) for seq in self.sequences]
        pending = (PENDING_TOKEN,)
        self.rows = tuple(
            StepRow(
                row.seq_id,
                row.end,
                pending,
                0,
                True,
                PLAIN_DRAFTING,
                None,
                0,
                row.adapter_id,
                length - 1,
            )
            for length, (_, row) in zip(lengths, in_flight, strict=True)
        )
        self._seq_ids = tuple(row.seq_id for row in self.rows)
        self.num_steps = min(row.max_end - row.num_computed_tokens for row in self.rows)
        self._at_edge: list[list[Sequence]] = [[] for _ in range(block_size)]
        for seq, row in zip(self.sequences, self.rows, strict=True):
            self._at_edge[-row.num_computed_tokens % block_size].append(seq)

    def yields(self, verified: collections.abc.Sequence[VerifiedRow]) -> TypeGuard[SampledTokens]:
        """Return whether the result of a step is a token of each sequence, in their order."""
        return isinstance(verified, SampledTokens) and verified.seq_ids == self._seq_ids

    def growing(self, place: int) -> list[Sequence]:
        """Return the sequences that may have another block than before a step of the run."""
        return self._at_edge[place % len(self._at_edge)] if place else self.sequences


class RepeatedDecodes(collections.abc.Sequence[tuple[Sequence, StepRow]]):
    """The rows of a step of a run. Their tokens stay pending: nothing but the target needs them.

    place: of the step in the run, from 0. rows: as they are sent; growing: see DecodeRun.
    """

    def __init__(self, run: DecodeRun, place: int) -> None:
        self.run, self.place = run, place
        self.rows = RepeatedRows(run.rows, place) if place else run.rows
        self.growing = run.growing(place)

    def follows(self, rows: Rows) -> bool:
        """Return whether they are those of the step after one with `rows`, as a rank takes them."""
        if self.place == 0:  # sent in full
            return True
        return isinstance(rows, RepeatedDecodes) and rows.place == self.place - 1

    def __len__(self) -> int:
        return len(self.run.sequences)

    def __iter__(self) -> Iterator[tuple[Sequence, StepRow]]:
        return zip(self.run.sequences, self.rows, strict=True)

    def __getitem__(self, index: Any) -> Any:
        return [*self][index]


def sent_rows(rows: Rows) -> collections.abc.Sequence[StepRow]:
    """Return the rows as the target receives them."""
    return rows.rows if isinstance(rows, RepeatedDecodes) else tuple(row for _, row in rows)
