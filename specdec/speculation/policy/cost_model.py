"""What a step costs by its batch size and number of draft tokens: measured once, then refined.

A start-up measurement gives the shape; what steps really take corrects it where they run. Medians
of a few steps keep a single slow one, as when another process wanted the machine, from mattering.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from specdec.types.errors import InvalidValueError

_SAMPLES_PER_MEDIAN = 5
_NEW_WEIGHT = 0.4
_MOST_CHANGE = math.log(4)
"""Of a correction by one median: however wrong that is, it moves the estimate by no more."""

_HALF_LIFE_S = 120.0


@dataclass(frozen=True)
class CostTable:
    """Seconds of a step, by decoding sequences and by draft tokens of each.

    batch_sizes, draft_tokens: of the rows and columns, ascending. seconds: [num_batch_sizes,
    num_draft_tokens]. What is measured is made monotone: a larger step is never cheaper, and one
    that seems to be was lucky.
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

    def step_s(self, num_decoding: int, num_draft_tokens: int) -> float:
        """Between measured shapes on the line through both, beyond them by the rows to run."""
        last_size, last_count = self.batch_sizes[-1], self.draft_tokens[-1]
        rows = [_interpolate(self.draft_tokens, row, num_draft_tokens) for row in self.seconds]
        beyond = max(1.0, num_decoding / last_size)
        beyond *= max(1.0, (1 + num_draft_tokens) / (1 + last_count))
        return beyond * _interpolate(self.batch_sizes, rows, num_decoding)


def _monotone(seconds: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    """The running maximum along both axes."""
    rows: list[tuple[float, ...]] = []
    for row in seconds:
        above, best, raised = rows[-1] if rows else (0.0,) * len(row), 0.0, []
        for value, floor in zip(row, above, strict=True):
            best = max(best, value, floor)
            raised.append(best)
        rows.append(tuple(raised))
    return tuple(rows)


def _interpolate(places: Sequence[int], values: Sequence[float], at: int) -> float:
    """Linear between the places; outside them the outermost value holds."""
    if at <= places[0]:
        return values[0]
    if at >= places[-1]:
        return values[-1]
    high = bisect_left(places, at)
    low = high - 1
    share = (at - places[low]) / (places[high] - places[low])
    return values[low] + share * (values[high] - values[low])


@dataclass
class _Cell:
    """What steps of one kind took, against the table. log_factor: of the estimate, since at_s."""

    log_factor: float | None = None
    at_s: float = 0.0
    samples: list[float] = field(default_factory=list)

    def add(self, ratio: float, now_s: float) -> None:
        self.samples.append(ratio)
        if len(self.samples) == _SAMPLES_PER_MEDIAN:
            self._learn(math.log(median(self.samples)), now_s)
            self.samples.clear()

    def estimate(self, now_s: float) -> float | None:
        """The correction's logarithm, fading while nothing is measured; None before the first."""
        if self.log_factor is None:
            return None
        return self.log_factor * math.pow(0.5, max(0.0, now_s - self.at_s) / _HALF_LIFE_S)

    def _learn(self, measured: float, now_s: float) -> None:
        known = self.estimate(now_s)
        if known is None:
            self.log_factor = measured
        else:
            change = max(-_MOST_CHANGE, min(_MOST_CHANGE, measured - known))
            self.log_factor = known + _NEW_WEIGHT * change
        self.at_s = now_s


class StepCosts:
    """The table, corrected by the steps that were run.

    Corrections are kept for each number of draft tokens and for ranges of batch sizes, and fade
    with a half-life of two minutes while nothing is measured there: what once seemed dear is tried
    again. What was never run takes the correction of the nearest that was: the nearest number of
    draft tokens first, so that a machine that has become slower is slower for all.
    """

    def __init__(self, table: CostTable) -> None:
        self._table = table
        self._cells: dict[int, dict[int, _Cell]] = {}  # by draft tokens, then by range

    def observe(
        self, num_decoding: int, num_draft_tokens: int, seconds: float, now_s: float
    ) -> None:
        """Takes in what a step took. Steps with prefill in them are not to be told."""
        if seconds <= 0:
            return
        by_range = self._cells.setdefault(num_draft_tokens, {})
        cell = by_range.setdefault(_range_of(num_decoding), _Cell())
        cell.add(seconds / self._table.step_s(num_decoding, num_draft_tokens), now_s)

    def step_s(self, num_decoding: int, num_draft_tokens: int, now_s: float) -> float:
        """Seconds that such a step is expected to take."""
        factor = self._log_factor(_range_of(num_decoding), num_draft_tokens, now_s)
        return self._table.step_s(num_decoding, num_draft_tokens) * math.exp(factor)

    def _log_factor(self, wanted: int, num_draft_tokens: int, now_s: float) -> float:
        known = [
            (abs(count - num_draft_tokens), abs(index - wanted), cell)
            for count, by_range in self._cells.items()
            for index, cell in by_range.items()
            if cell.log_factor is not None
        ]
        if not known:
            return 0.0
        _, _, nearest = min(known, key=lambda each: each[:2])
        return nearest.estimate(now_s) or 0.0


def _range_of(num_decoding: int) -> int:
    """Up to 3 each batch size is a range of its own; then each is 1.4 times as wide."""
    return round(2 * math.log2(max(1, num_decoding)))
