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
    """The rows of a step `num_steps` after that of `first`, whose tokens are pending.

    They are those of `first`, that many tokens later.
    """

    def __init__(self, first: tuple[StepRow, ...], num_steps: int) -> None:
        self.first, self.num_steps = first, num_steps

    @classmethod
    def after(cls, rows: Sequence[StepRow]) -> RepeatedRows:
        """Return the rows of the step after one with `rows`."""
        assert rows, "a step repeats one without rows"
        if isinstance(rows, RepeatedRows):
            return cls(rows.first, rows.num_steps + 1)
        return cls(tuple(rows), 1)

    def __len__(self) -> int:
        return len(self.first)

    @cached_property
    def rows(self) -> tuple[StepRow, ...]:
        """All rows."""
        later = self.num_steps
        return tuple(StepRow(row[0], row[1] + later, *row[2:]) for row in self.first)


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
