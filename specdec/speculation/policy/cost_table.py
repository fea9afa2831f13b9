"""Cost table: seconds of a step by batch size and draft tokens, as profiled at the start."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, repeat

from specdec.types.errors import InvalidValueError


@dataclass(frozen=True)
class CostTable:
    """Seconds of a step, by number of decoding sequences and by draft tokens of each.

    batch_sizes: of the rows, ascending. draft_tokens: of the columns, ascending; they determine the
    rows that a target runs. seconds: [num_batch_sizes, num_columns]. A step counts as at most as
    long as a larger one: other load on the machine only adds time to a measurement.
    """

    batch_sizes: tuple[int, ...]
    draft_tokens: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        shape_is_right = len(self.seconds) == len(self.batch_sizes) >= 1 and all(
            len(row) == len(self.draft_tokens) >= 1 for row in self.seconds
        )
        if not shape_is_right:
            raise InvalidValueError("seconds", self.seconds, "one number for each shape")
        if any(not 0 < value < math.inf for row in self.seconds for value in row):
            raise InvalidValueError("seconds", self.seconds, "numbers above 0")
        for name in ("batch_sizes", "draft_tokens"):
            values = getattr(self, name)
            if any(low >= high for low, high in pairwise(values)):
                raise InvalidValueError(name, values, "ascending")
        object.__setattr__(self, "seconds", _monotone(self.seconds))

    def mapped(self, change: Callable[[int, int, float], float]) -> CostTable:
        """Return a table of change(batch_size, num_draft_tokens, seconds)."""
        seconds = tuple(
            tuple(change(size, *each) for each in zip(self.draft_tokens, row, strict=True))
            for size, row in zip(self.batch_sizes, self.seconds, strict=True)
        )
        return CostTable(self.batch_sizes, self.draft_tokens, seconds)

    def describe(self) -> str:
        """Return the milliseconds by draft tokens, for each batch size, in one line for the log."""
        rows = []
        for size, row in zip(self.batch_sizes, self.seconds, strict=True):
            each = zip(self.draft_tokens, row, strict=True)
            times = ", ".join(f"{count} drafts {1000 * value:.1f}" for count, value in each)
            rows.append(f"batch {size}: {times}")
        return "; ".join(rows)

    def step_s(self, num_decoding: int, count: float) -> float:
        """Return the seconds of a step, linear between measured ones, beyond them by its rows.

        count: draft tokens of each sequence, or their mean.
        """
        last_size, last_count = self.batch_sizes[-1], self.draft_tokens[-1]
        rows = [_interpolate(self.draft_tokens, row, count) for row in self.seconds]
        beyond = max(1.0, num_decoding / last_size)
        beyond *= max(1.0, (1 + count) / (1 + last_count))
        return beyond * _interpolate(self.batch_sizes, rows, num_decoding)

    def pass_s(self, num_rows: int) -> float:
        """Return the seconds of a pass over a number of tokens, of whatever sequences.

        It is that of the cheapest measured step of as many tokens or more, linear between those,
        and proportional beyond the largest.
        """
        sizes, seconds = self._passes
        return max(1.0, num_rows / sizes[-1]) * _interpolate(sizes, seconds, num_rows)

    @cached_property
    def _passes(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The numbers of tokens of the measured steps, ascending, and the seconds of each."""
        cheapest: dict[int, float] = {}
        for size, row in zip(self.batch_sizes, self.seconds, strict=True):
            for count, value in zip(self.draft_tokens, row, strict=True):
                num_rows = size * (1 + count)
                cheapest[num_rows] = min(value, cheapest.get(num_rows, math.inf))
        sizes, floor, seconds = sorted(cheapest), math.inf, []
        for num_rows in reversed(sizes):
            floor = min(floor, cheapest[num_rows])
            seconds.append(floor)
        return tuple(sizes), tuple(reversed(seconds))


def _monotone(seconds: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    """Return the minimum over each step and all that are as large along both axes."""
    rows: list[tuple[float, ...]] = []
    for row in reversed(seconds):
        least = accumulate(reversed(row), min)
        above = reversed(rows[-1]) if rows else repeat(math.inf)
        rows.append(tuple(map(min, least, above))[::-1])
    return tuple(reversed(rows))


def _interpolate(places: Sequence[int], values: Sequence[float], at: float) -> float:
    """Interpolate linearly between the places; outside them the outermost value applies."""
    if at <= places[0]:
        return values[0]
    if at >= places[-1]:
        return values[-1]
    high = bisect_left(places, at)
    low = high - 1
    share = (at - places[low]) / (places[high] - places[low])
    return values[low] + share * (values[high] - values[low])
