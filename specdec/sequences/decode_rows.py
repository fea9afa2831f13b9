"""Rows and results of steps that decode one token for each sequence, made where they are read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

from specdec.types.messages import StepRow, VerifiedRow

RowT = TypeVar("RowT")


class RowsOnDemand(Sequence[RowT]):
    """Rows that are made when the first one is read: the engine rarely needs them."""

    @cached_property
    @abstractmethod
    def rows(self) -> tuple[RowT, ...]:
        """All rows."""

    def __iter__(self) -> Iterator[RowT]:
        return iter(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]


class RepeatedRows(RowsOnDemand[StepRow]):
    """The rows of the step before, a token later, and others after them.

    The repeated ones are those of `first`, `num_steps` tokens later; their tokens are pending.

    left: ids of sequences whose row in the step before is not repeated. joining: the other rows.
    """

    def __init__(
        self,
        first: tuple[StepRow, ...],
        num_steps: int,
        left: Sequence[int] = (),
        joining: tuple[StepRow, ...] = (),
    ) -> None:
        self.first, self.num_steps = first, num_steps
        self.left, self.joining = left, joining

    @classmethod
    def after(
        cls,
        rows: Sequence[StepRow],
        left: Sequence[int] = (),
        joining: tuple[StepRow, ...] = (),
    ) -> RepeatedRows:
        """Return the rows of the step after one with `rows`."""
        repeated = rows if isinstance(rows, RepeatedRows) else cls((), 0, (), tuple(rows))
        first, num_steps = repeated.first, repeated.num_steps
        if repeated.joining:
            first += tuple(_later(row, -num_steps) for row in repeated.joining)
        if left:
            gone = frozenset(left)
            first = tuple([row for row in first if row.seq_id not in gone])
        return cls(first, num_steps + 1, left, joining)

    def __len__(self) -> int:
        return len(self.first) + len(self.joining)

    @cached_property
    def rows(self) -> tuple[StepRow, ...]:
        """All rows."""
        num_steps = self.num_steps
        return (*(_later(row, num_steps) for row in self.first), *self.joining)


def _later(row: StepRow, num_tokens: int) -> StepRow:
    return StepRow(row[0], row[1] + num_tokens, *row[2:])


class SampledTokens(RowsOnDemand[VerifiedRow]):
    """The rows of a VerifyOutput with one token for each sequence, and nothing else."""

    def __init__(self, seq_ids: tuple[int, ...], token_ids: tuple[int, ...]) -> None:
        self.seq_ids, self.token_ids = seq_ids, token_ids

    def __len__(self) -> int:
        return len(self.seq_ids)

    @cached_property
    def rows(self) -> tuple[VerifiedRow, ...]:
        """All rows."""
        pairs = zip(self.seq_ids, self.token_ids, strict=True)
        return tuple(VerifiedRow(seq_id, (token_id,)) for seq_id, token_id in pairs)
