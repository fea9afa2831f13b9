"""Cost model: seconds of a step by batch size and draft shape, profiled once and then corrected.

Profiling at start-up gives a table; the seconds of real steps correct it where they run. Medians of
a few steps filter single slow ones, such as when another process used the machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from specdec.speculation.policy.cost_table import CostTable
from specdec.types.drafts.draft_decision import DraftAhead, DraftShape, chain
from specdec.types.reports.additive import Additive

_SAMPLES_PER_MEDIAN, _FIRST_SAMPLES = 5, 3
"""Steps of a median, and of the first one of a kind: in a large batch each of them is expensive."""

_SAMPLES_HOLD_S = 10.0
"""Time after which samples without another one are dropped: the machine may have changed."""

_MACHINE_RATE, _SHAPE_RATE, _FIRST_SHAPE_RATE = 0.4, 0.2, 0.6
"""Parts of an error that correct all steps, those of its kind, and these for the first time."""

_COMPARED_RATE, _NUM_COMPARED = 0.5, 2
"""Part of an error that corrects a kind alone, in its first medians after another shape's."""

_FRESH_S, _FRESH_STEPS = 0.5, 20
"""Time, or steps if these take longer, for which the correction of all steps is as good as
measured. What the first steps of another kind differ by meanwhile is a matter of their kind."""

_MAX_LOG_ERROR, _MAX_LOG_FACTOR = math.log(4), math.log(16)
"""Most that one median, however wrong, counts for, and bound of a correction: logarithms."""

_HALF_LIFE_S, _KNOWN_S = 600.0, 600.0
"""Half-life of a correction of a kind, and time for which it counts as known."""


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

    def learn(self, log_factor: float, now_s: float) -> None:
        """Set the correction, within its bound."""
        self.log_factor, self.at_s = _bounded(log_factor, _MAX_LOG_FACTOR), now_s

    def estimate(self, now_s: float) -> float:
        """Return the correction's logarithm, decayed since the last sample; 0 before one."""
        if self.log_factor is None:
            return 0.0
        return self.log_factor * math.pow(0.5, max(0.0, now_s - self.at_s) / _HALF_LIFE_S)


def _bounded(value: float, most: float) -> float:
    return max(-most, min(most, value))


class _Kind(NamedTuple):
    """Kind of steps that share a correction. is_divided: whether some have fewer drafts."""

    shape: DraftShape
    is_divided: bool = False


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
    are learned where shapes follow each other, which compares them on the same machine; while one
    goes on, whatever changes is the machine. Without samples they decay with a half-life of ten
    minutes, so that a shape that once was slow is tried again. A step that never ran takes that of
    the nearest one, by number of draft tokens first. A draft model's seconds are measured apart,
    and correct what all lengths take to draft. All corrections are bounded.
    """

    def __init__(
        self,
        table: CostTable,
        ahead: CostTable | None = None,
        drafting: CostTable | None = None,
        *,
        verification: CostTable | None = None,
        most_padding_tokens: int = 0,
    ) -> None:
        """table: of whole steps, drafts included.

        ahead: of steps whose drafts were made ahead; None where none are. drafting: of making
            drafts alone; None where that was not measured.
        verification: of steps that make no drafts, where these take time; None where they take
            none. most_padding_tokens: as in EngineConfig.
        """
        self._table = table
        self._ahead = ahead or table
        self._drafting = drafting
        self._verification = verification or table
        self._most_padding = most_padding_tokens
        self._log_machine: float | None = None  # correction of all steps: its logarithm
        self._machine_at_s = -math.inf
        self._of_drafting = _Cell()  # beyond that of all steps
        self._last: tuple[_Kind, _Cell] | None = None  # of the last median
        self._num_compared_left = 0  # medians that are compared with the shape before
        self._cells: dict[_Kind, dict[int, _Cell]] = {}  # by kind, then by range of batch sizes
        self._nearest: dict[tuple[_Kind, int], _Cell | None] = {}  # the same kinds, and others
        self.observed = StepSeconds()

    def observe(
        self,
        num_decoding: int,
        shape: DraftShape,
        seconds: float,
        now_s: float,
        *,
        drafted_s: float = 0.0,
        num_rows: float | None = None,
    ) -> None:
        """Record the seconds of a step without prefill.

        drafted_s: those of them in which a draft model made its drafts; 0 where that is not known.
        num_rows: draft tokens of a sequence, on average; None for those of the shape.
        """
        if seconds <= 0:
            return
        if drafted_s > 0:
            self._observe_drafting(num_decoding, shape, drafted_s, now_s)
        kind = self._kind(num_decoding, shape, num_rows)
        cell = self._cells.setdefault(kind, {}).setdefault(range_of(num_decoding), _Cell())
        profiled_s = self.profiled_s(num_decoding, shape, num_rows)
        self.observed.add(shape.num_draft_tokens, seconds, profiled_s)
        expected_s = profiled_s + self._drafting_error_s(num_decoding, shape)
        ratio = cell.median_of(seconds / expected_s, now_s)
        if ratio is not None:
            self._learn(num_decoding, kind, math.log(ratio), now_s, seconds)

    def _observe_drafting(
        self, num_decoding: int, shape: DraftShape, drafted_s: float, now_s: float
    ) -> None:
        """Correct what drafts take by the seconds of a draft model, beyond the machine."""
        cell, profiled_s = self._of_drafting, self.draft_s(num_decoding, shape)
        if not profiled_s or self._log_machine is None:
            return
        ratio = cell.median_of(drafted_s / profiled_s, now_s)
        if ratio is not None:
            known = cell.log_factor or 0.0
            error = _bounded(math.log(ratio) - self._log_machine - known, _MAX_LOG_ERROR)
            cell.learn(known + _SHAPE_RATE * error, now_s)

    def _drafting_error_s(self, num_decoding: int, shape: DraftShape) -> float:
        """Return by how much making the drafts of a step takes longer than profiled."""
        log_factor = self._of_drafting.log_factor
        has_drafts = shape.num_draft_tokens > 0 and shape.ahead is DraftAhead.OFF
        if not log_factor or not has_drafts:
            return 0.0
        return math.expm1(log_factor) * self.draft_s(num_decoding, shape)

    def _learn(
        self, num_decoding: int, kind: _Kind, log_ratio: float, now_s: float, step_s: float
    ) -> None:
        """Divide the error of an estimate between all steps and those of its kind.

        The very first one is that of the machine: the shapes were profiled side by side. Right
        after another shape it is that of the kind, since the machine was just measured.
        """
        index = range_of(num_decoding)
        cell = self._cells[kind][index]
        log_kind = self._log_of_kind(index, kind, now_s)
        if cell.log_factor is None:
            self._nearest.clear()
        is_fresh = now_s - self._machine_at_s < max(_FRESH_S, _FRESH_STEPS * step_s)
        of_machine, of_kind = self._rates(kind, cell, is_fresh=is_fresh)
        self._machine_at_s = now_s
        if self._log_machine is None:
            self._log_machine = _bounded(log_ratio, _MAX_LOG_FACTOR)
            cell.learn(0.0, now_s)
            return
        error = _bounded(log_ratio - self._log_machine - log_kind, _MAX_LOG_ERROR)
        log_machine = self._log_machine + of_machine * error
        self._log_machine = _bounded(log_machine, _MAX_LOG_FACTOR)
        cell.learn(log_kind + of_kind * error, now_s)

    def _rates(self, kind: _Kind, cell: _Cell, *, is_fresh: bool) -> tuple[float, float]:
        """Return the parts of an error that correct all steps, and those of its kind."""
        last, self._last = self._last, (kind, cell)
        if last is None or last[0] != kind:
            self._num_compared_left = _NUM_COMPARED if is_fresh else 0
        is_compared = self._num_compared_left > 0
        self._num_compared_left -= is_compared
        if cell.log_factor is None:
            return (0.0, 1.0) if is_fresh else (_MACHINE_RATE, _FIRST_SHAPE_RATE)
        if is_compared:
            return 0.0, _COMPARED_RATE
        return _MACHINE_RATE, 0.0 if last is not None and last[1] is cell else _SHAPE_RATE

    def is_observed(
        self, num_decoding: int, shape: DraftShape, num_rows: float | None = None
    ) -> bool:
        """Return whether steps of this kind have corrected the table for such a batch.

        num_rows: see `observe`.
        """
        return self.is_known(num_decoding, shape, -math.inf, num_rows)

    def is_known(
        self, num_decoding: int, shape: DraftShape, now_s: float, num_rows: float | None = None
    ) -> bool:
        """Return whether they have done so in the last minutes."""
        kind = self._kind(num_decoding, shape, num_rows)
        cell = self._cells.get(kind, {}).get(range_of(num_decoding))
        if cell is None or cell.log_factor is None:
            return False
        return now_s - cell.at_s < _KNOWN_S

    def least_step_s(self, num_decoding: int, shape: DraftShape, now_s: float) -> float:
        """Return the seconds of a step that are expected, or profiled if these are fewer.

        Where a shape was not observed, steps of others may be slow for a reason of their own.
        """
        return min(self.profiled_s(num_decoding, shape), self.step_s(num_decoding, shape, now_s))

    def step_s(
        self, num_decoding: int, shape: DraftShape, now_s: float, num_rows: float | None = None
    ) -> float:
        """Return the expected seconds of a step. num_rows: see `observe`."""
        drafting_s = self._drafting_error_s(num_decoding, shape)
        expected_s = self.profiled_s(num_decoding, shape, num_rows) + drafting_s
        kind = self._kind(num_decoding, shape, num_rows)
        return expected_s * self._factor(num_decoding, kind, now_s)

    def profile_error(self, num_decoding: int, shape: DraftShape, now_s: float) -> float | None:
        """Return the expected seconds of a step over the profiled ones; None before any step."""
        if self._log_machine is None:
            return None
        expected_s = self.step_s(num_decoding, shape, now_s)
        return expected_s / self.profiled_s(num_decoding, shape)

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
        return added_s * self._factor(num_decoding, _Kind(chain(0)), now_s)

    def draft_s(self, num_decoding: int, shape: DraftShape) -> float:
        """Return the profiled seconds of making drafts that a step waits for."""
        if self._drafting is None:
            return 0.0
        return self._drafting.step_s(num_decoding, shape.num_draft_tokens)

    def profiled_s(
        self, num_decoding: int, shape: DraftShape, num_rows: float | None = None
    ) -> float:
        """Return the seconds that the table of the start has for a step. num_rows: see `observe`.

        Fewer rows are verified in less time; the drafts are made at the length of the shape. What
        rows save is a difference within one table, and at most what that has for them, however the
        noise of two measurements differs.
        """
        count = shape.num_draft_tokens
        table = self._table if shape.ahead is DraftAhead.OFF else self._ahead
        whole_s = table.step_s(num_decoding, count)
        if num_rows is None or not self._kind(num_decoding, shape, num_rows).is_divided:
            return whole_s
        verified_s = min(whole_s, self._verification.step_s(num_decoding, count))
        fewer_s = self._verification.step_s(num_decoding, num_rows)
        return whole_s - max(0.0, verified_s - fewer_s)

    def _kind(self, num_decoding: int, shape: DraftShape, num_rows: float | None) -> _Kind:
        """Return the kind of a step: with fewer rows that of equal lengths, where these are padded.

        A device also pads to the sizes of its graphs, so that it may run other steps by rows.
        """
        if num_rows is None or not self._most_padding:
            return _Kind(shape, num_rows is not None)
        num_padding = num_decoding * (shape.num_draft_tokens - num_rows)
        return _Kind(shape, num_padding > self._most_padding)

    def _factor(self, num_decoding: int, kind: _Kind, now_s: float) -> float:
        """Return the correction of a step."""
        log_kind = self._log_of_kind(range_of(num_decoding), kind, now_s)
        return math.exp((self._log_machine or 0.0) + log_kind)

    def _log_of_kind(self, wanted: int, kind: _Kind, now_s: float) -> float:
        """Return the correction of the nearest kind of steps: its logarithm, 0 without one."""
        place = kind, wanted
        if place not in self._nearest:
            self._nearest[place] = self._nearest_cell(*place)
        cell = self._nearest[place]
        return 0.0 if cell is None else cell.estimate(now_s)

    def _nearest_cell(self, kind: _Kind, wanted: int) -> _Cell | None:
        """Return the nearest cell with a correction."""
        shape = kind.shape
        known = [
            (
                each.shape.ahead is not shape.ahead,
                abs(each.shape.num_draft_tokens - shape.num_draft_tokens),
                each.is_divided != kind.is_divided,
                abs(index - wanted),
                cell,
            )
            for each, by_range in self._cells.items()
            for index, cell in by_range.items()
            if cell.log_factor is not None
        ]
        return min(known, key=lambda each: each[:-1])[-1] if known else None


def range_of(num_decoding: int) -> int:
    """Return the range of a batch size: a size each up to 3, then each 1.4 times as wide."""
    return round(2 * math.log2(max(1, num_decoding)))
