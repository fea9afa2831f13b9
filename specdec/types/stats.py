"""Counts of drafted and accepted tokens, of one request or of all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import reduce
from itertools import zip_longest
from typing import Any, Self

STRUCTURED_OUTPUT = "structured_output"
"""The drafting method that is counted where a grammar left a row only one continuation."""


class Additive:
    """Base of dataclasses of counters: two of the same kind are added field by field.

    Tuples are added by position and mappings by name; either side may have more of them.
    """

    def plus(self, other: Self) -> Self:
        """Return the sum of both."""
        return self._combined(other, added)

    def minus(self, before: Self) -> Self:
        """Return what was counted after the earlier snapshot `before`."""
        return self._combined(before, subtracted)

    @classmethod
    def sum(cls, counts: Iterable[Self]) -> Self:
        """Return the sum of all."""
        return reduce(lambda left, right: left.plus(right), counts, cls())

    def _combined(self, other: Self, combine: Callable[[Any, Any], Any]) -> Self:
        names = [each.name for each in fields(self)]  # type: ignore[arg-type]
        values = {name: combine(getattr(self, name), getattr(other, name)) for name in names}
        return type(self)(**values)


def added(left: Any, right: Any) -> Any:
    """Return the sum of two values of a field."""
    match left:
        case Additive():
            return left.plus(right)
        case tuple():
            return tuple(map(sum, zip_longest(left, right, fillvalue=0)))
        case Mapping():
            both = {name: added(left[name], right[name]) for name in left.keys() & right.keys()}
            return {**left, **right, **both}
        case _:
            return left + right


def subtracted(left: Any, right: Any) -> Any:
    """Return left minus right, which is an earlier snapshot of left."""
    match left:
        case Additive():
            return left.minus(right)
        case tuple():
            return tuple(a - b for a, b in zip_longest(left, right, fillvalue=0))
        case Mapping():
            return {**left, **{name: subtracted(left[name], right[name]) for name in right}}
        case _:
            return left - right


@dataclass(frozen=True)
class SpeculationStats(Additive):
    """Counts of verified drafts, their tokens and the accepted ones.

    num_drafts: verified drafts, one per step and sequence. num_draft_tokens: tokens in them.
    num_accepted_tokens: those that became output.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def after_draft(self, num_draft_tokens: int, num_accepted_tokens: int) -> SpeculationStats:
        """Return the counts with one more verified draft; an empty draft is not counted."""
        if not num_draft_tokens:
            return self
        return SpeculationStats(
            self.num_drafts + 1,
            self.num_draft_tokens + num_draft_tokens,
            self.num_accepted_tokens + num_accepted_tokens,
        )

    @property
    def acceptance_rate(self) -> float:
        """Accepted per drafted token; 0 when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a draft yields, the target's own included; 1 when nothing was drafted."""
        return 1 + (self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0)


class AcceptanceByPosition:
    """Counters of drafted and of accepted tokens at each draft position, first to last."""

    def __init__(self) -> None:
        self._drafted: list[int] = []
        self._accepted: list[int] = []

    def record(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Count one verified draft, of which a prefix was accepted."""
        num_new = num_draft_tokens - len(self._drafted)
        if num_new > 0:
            self._drafted.extend([0] * num_new)
            self._accepted.extend([0] * num_new)
        for position in range(num_draft_tokens):
            self._drafted[position] += 1
        for position in range(num_accepted_tokens):
            self._accepted[position] += 1

    @property
    def drafted(self) -> tuple[int, ...]:
        """Drafts that had a token at each position of the longest draft so far."""
        return tuple(self._drafted)

    @property
    def accepted(self) -> tuple[int, ...]:
        """Drafts whose token at each position was accepted."""
        return tuple(self._accepted)
