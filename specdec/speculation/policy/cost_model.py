"""Cost model: seconds of a step by batch size and draft shape, profiled once and then corrected.

Profiling at start-up gives a table; the seconds of real steps correct it where they run. Medians of
a few steps filter single slow ones, such as when another process used the machine.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import median

from specdec.types.drafts.draft_decision import DraftAhead, DraftShape, chain
from specdec.types.errors import InvalidValueError
from specdec.types.reports.stats import Additive

_SAMPLES_PER_MEDIAN, _FIRST_SAMPLES = 5, 3
"""Steps of a median, and of the first one of a kind: in a large batch each of them is expensive."""

_SAMPLES_HOLD_S = 10.0
"""Time after which samples without another one are dropped: the machine may have changed."""

_MACHINE_RATE, _SHAPE_RATE, _FIRST_SHAPE_RATE = 0.4, 0.2, 0.6
"""Parts of an error that correct all steps, those of its kind, and these for the first time."""

_FRESH_S = 0.5
"""Time for which the correction of all steps is as good as measured. What the first steps of
another kind differ by meanwhile is a matter of their kind."""

_MAX_LOG_ERROR = math.log(4)
"""Most that one median, however wrong, counts for: the logarithm of its ratio to the estimate."""

_HALF_LIFE_S = 120.0


@dataclass(frozen=True)
class CostTable:
    """Seconds of a step, by number of decoding sequences and by draft tokens of each.

    batch_sizes: of the rows, ascending. draft_tokens: of the columns, ascending; they determine the
    rows that a target runs. seconds: [num_batch_sizes, num_columns]. Measurements are made
    monotone, since a larger step is never cheaper.
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

    def step_s(self, num_decoding: int, count: int) -> float:
        """Return the seconds of a step, linear between measured ones, beyond them by its rows.

        count: draft tokens of each sequence.
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
    """Return the running maximum along both axes."""
    rows: list[tuple[float, ...]] = []
    for row in seconds:
        above, best, raised = rows[-1] if rows else (0.0,) * len(row), 0.0, []
        for value, floor in zip(row, above, strict=True):
            best = max(best, value, floor)
            raised.append(best)
        rows.append(tuple(raised))
    return tuple(rows)


def _interpolate(places: Sequence[int], values: Sequence[float], at: int) -> float:
    """Interpolate linearly between the places; outside them the outermost value applies."""
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
    """Steps of one kind: recent ratios of measured to profiled seconds, not learned yet.

    log_factor: correction of the table beyond that of all steps, at the time at_s: its logarithm.
    sampled_at_s: time of the last ratio.
    """

    log_factor: float | None = None
    at_s: float = 0.0
    samples: list[float] = field(default_factory=list)
    sampled_at_s: float = 0.0

    def median_of(self, ratio: float, now_s: float) -> float | None:
        """Add a ratio, and return the median of the last ones once these are enough."""
        if now_s - self.sampled_at_s > _SAMPLES_HOLD_S:
            self.samples.clear()
        self.sampled_at_s = now_s
        self.samples.append(ratio)
        needed = _FIRST_SAMPLES if self.log_factor is None else _SAMPLES_PER_MEDIAN
        if len(self.samples) < needed:
            return None
        found = median(self.samples)
        self.samples.clear()
        return found

    def estimate(self, now_s: float) -> float:
        """Return the correction's logarithm, decayed since the last sample; 0 before one."""
        if self.log_factor is None:
            return 0.0
        return self.log_factor * math.pow(0.5, max(0.0, now_s - self.at_s) / _HALF_LIFE_S)


@dataclass
class StepSeconds(Additive):
    """Seconds of observed steps, and those that the table has for them, by number of drafts.

    spent: of all, with the waiting for drafts. undrafted: estimated for their tokens without any.
    """

    measured: dict[str, float] = field(default_factory=dict)
    profiled: dict[str, float] = field(default_factory=dict)
    spent: float = 0.0
    undrafted: float = 0.0

    def add(self, num_draft_tokens: int, measured_s: float, profiled_s: float) -> None:
        """Count one step."""
        label = str(num_draft_tokens)
        self.measured[label] = self.measured.get(label, 0.0) + measured_s
        self.profiled[label] = self.profiled.get(label, 0.0) + profiled_s


class CostModel:
    """Cost table with corrections by the steps that were run.

    One correction is that of all steps, and follows some ten of them: a machine that has become
    slower, by other load or a lower clock, is slower for all shapes, which changes nothing about
    the best one. The others are what remains for each draft shape and range of batch sizes. They
    learn more slowly, and without samples decay with a half-life of two minutes, so that a shape
    that once was slow is tried again. A step that never ran takes that of the nearest one, by
    number of draft tokens first. Two kinds of steps that were first observed right after each
    other are compared on the same machine: their difference is learned at once.
    """

    def __init__(
        self, table: CostTable, ahead: CostTable | None = None, drafting: CostTable | None = None
    ) -> None:
        """table: of whole steps, drafts included.

        ahead: of steps whose drafts were made ahead; None where none are. drafting: of making
            drafts alone.
        """
        self._table = table
        self._ahead = ahead
        self._drafting = drafting
        self._log_machine: float | None = None  # correction of all steps: its logarithm
        self._machine_at_s = -math.inf
        self._cells: dict[DraftShape, dict[int, _Cell]] = {}  # by shape, then by range
        self._nearest: dict[tuple[DraftShape, int], _Cell | None] = {}  # the same kinds, and others
        self.observed = StepSeconds()

    def observe(self, num_decoding: int, shape: DraftShape, seconds: float, now_s: float) -> None:
        """Record the seconds of a step without prefill."""
        if seconds <= 0:
            return
        by_range = self._cells.setdefault(shape, {})
        cell = by_range.setdefault(range_of(num_decoding), _Cell())
        profiled_s = self._profiled_s(num_decoding, shape)
        self.observed.add(shape.num_draft_tokens, seconds, profiled_s)
        ratio = cell.median_of(seconds / profiled_s, now_s)
        if ratio is not None:
            self._learn(num_decoding, shape, math.log(ratio), now_s)

    def _learn(self, num_decoding: int, shape: DraftShape, log_ratio: float, now_s: float) -> None:
        """Divide the error of an estimate between all steps and those of its kind.

        The very first one is that of the machine: the shapes were profiled side by side.
        """
        index = range_of(num_decoding)
        cell = self._cells[shape][index]
        of_shape = self._log_of_shape(index, shape, now_s)
        if cell.log_factor is None:
            self._nearest.clear()
        is_fresh = now_s - self._machine_at_s < _FRESH_S
        self._machine_at_s = now_s
        if self._log_machine is None:
            self._log_machine, cell.log_factor, cell.at_s = log_ratio, 0.0, now_s
            return
        error = log_ratio - self._log_machine - of_shape
        error = max(-_MAX_LOG_ERROR, min(_MAX_LOG_ERROR, error))
        of_machine, of_kind = _MACHINE_RATE, _SHAPE_RATE
        if cell.log_factor is None:
            of_machine, of_kind = (0.0, 1.0) if is_fresh else (_MACHINE_RATE, _FIRST_SHAPE_RATE)
        self._log_machine += of_machine * error
        cell.log_factor, cell.at_s = of_shape + of_kind * error, now_s

    def is_observed(self, num_decoding: int, shape: DraftShape) -> bool:
        """Return whether steps of this shape have corrected the table for such a batch."""
        cell = self._cells.get(shape, {}).get(range_of(num_decoding))
        return cell is not None and cell.log_factor is not None

    def least_step_s(self, num_decoding: int, shape: DraftShape, now_s: float) -> float:
        """Return the seconds of a step that are expected, or profiled if these are fewer.

        Where a shape was not observed, steps of others may be slow for a reason of their own.
        """
        profiled_s = self._profiled_s(num_decoding, shape)
        return min(profiled_s, self.step_s(num_decoding, shape, now_s))

    def step_s(self, num_decoding: int, shape: DraftShape, now_s: float) -> float:
        """Return the expected seconds of a step."""
        return self._profiled_s(num_decoding, shape) * self._factor(num_decoding, shape, now_s)

    def prompt_s(
        self, num_decoding: int, num_draft_tokens: int, num_prompt_tokens: int, now_s: float
    ) -> float:
        """Return by how much the tokens of prompts lengthen a step whose drafts are given.

        num_draft_tokens: of each sequence. Where weights are read for few sequences these tokens
        are nearly free, and then rows of drafts are not: both together are bound by arithmetic.
        """
        num_rows = num_decoding * (1 + num_draft_tokens)
        table = self._table
        added_s = table.pass_s(num_rows + num_prompt_tokens) - table.pass_s(num_rows)
        return added_s * self._factor(num_decoding, chain(0), now_s)

    def draft_s(self, num_decoding: int, shape: DraftShape) -> float:
        """Return the profiled seconds of making drafts that a step waits for."""
        if self._drafting is None:
            return 0.0
        return self._drafting.step_s(num_decoding, shape.num_draft_tokens)

    def _profiled_s(self, num_decoding: int, shape: DraftShape) -> float:
        table = self._table
        if shape.ahead is not DraftAhead.OFF and self._ahead is not None:
            table = self._ahead
        return table.step_s(num_decoding, shape.num_draft_tokens)

    def _factor(self, num_decoding: int, shape: DraftShape, now_s: float) -> float:
        """Return the correction of a step."""
        of_shape = self._log_of_shape(range_of(num_decoding), shape, now_s)
        return math.exp((self._log_machine or 0.0) + of_shape)

    def _log_of_shape(self, wanted: int, shape: DraftShape, now_s: float) -> float:
        """Return the correction of the nearest kind of steps: its logarithm, 0 without one."""
        kind = shape, wanted
        if kind not in self._nearest:
            self._nearest[kind] = self._nearest_cell(*kind)
        cell = self._nearest[kind]
        return 0.0 if cell is None else cell.estimate(now_s)

    def _nearest_cell(self, shape: DraftShape, wanted: int) -> _Cell | None:
        """Return the nearest cell with a correction."""
        known = [
            (
                each.ahead is not shape.ahead,
                abs(each.num_draft_tokens - shape.num_draft_tokens),
                abs(index - wanted),
                cell,
            )
            for each, by_range in self._cells.items()
            for index, cell in by_range.items()
            if cell.log_factor is not None
        ]
        return min(known, key=lambda each: each[:3])[3] if known else None


def range_of(num_decoding: int) -> int:
    """Return the range of a batch size: a size each up to 3, then each 1.4 times as wide."""
    return round(2 * math.log2(max(1, num_decoding)))
