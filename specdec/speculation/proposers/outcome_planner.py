"""Plans what a draft model drafts ahead: which outcomes of a row, and how far after each.

More outcomes make a hit more likely, and longer drafts make it worth more; both take time of the
draft device. The plan is the one with the most expected tokens per second, according to two
measurements: how often each outcome occurs (`OutcomeStatistics`), and how long the passes of both
models take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specdec.speculation.proposers.outcome_statistics import Likeliest, OutcomeStatistics
from specdec.speculation.proposers.pass_times import PassTimes
from specdec.types.draft_messages import DraftPass
from specdec.types.drafts.draft_decision import DraftAhead
from specdec.types.drafts.draft_tree import MAX_TREE_NODES

_BRANCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of outcomes of a row that are compared."""

_USED_SHARE = 0.9
"""Part of a step of the target within which drafts ahead should be complete that no row awaits."""

_KEPT_STEPS = 8
"""Steps of one kind with the same shape: a comparison takes the host up to some milliseconds."""

_KEPT = 0.95
"""Part of the weight of earlier steps that a new one leaves."""


class RowPlan(NamedTuple):
    """The drafts to make after one row; see AheadRow."""

    fan_out: tuple[int, ...]
    num_draft_tokens: int

    @property
    def num_drafts(self) -> int:
        """Drafts in flight."""
        return len(self.fan_out) - 1

    @property
    def num_nodes(self) -> int:
        """As in AheadRow."""
        return self.num_drafts + sum(self.fan_out) * self.num_draft_tokens

    def within(self, num_nodes: int) -> RowPlan | None:
        """Return the plan if it has at most `num_nodes`, else as much of one chain; or None."""
        if self.num_nodes <= num_nodes:
            return self
        count = min(self.num_draft_tokens, num_nodes - self.num_drafts)
        return RowPlan((0,) * self.num_drafts + (1,), count) if count > 0 else None


class RowSize(NamedTuple):
    """The drafts of a row that are in flight, and the most tokens to draft after an outcome."""

    num_drafts: int
    num_next_tokens: int

    def num_branches(self, shape: _Shape) -> int:
        """Return how many outcomes of the row have room in its tree."""
        room = (MAX_TREE_NODES - self.num_drafts) // self.num_levels(shape)
        return max(1, min(shape.num_branches, room))

    def num_levels(self, shape: _Shape) -> int:
        """Return how many tokens to draft after each outcome of the row."""
        return min(self.num_next_tokens, shape.num_levels)


class _Shape(NamedTuple):
    """Outcomes of each row, and tokens after each of them: passes of the draft model."""

    num_levels: int
    num_branches: int


class _Kind(NamedTuple):
    """Properties of a step that determine its shape. max_tokens: of a pass."""

    num_rows: int
    most_levels: int
    most_branches: int
    may_wait: bool
    max_tokens: int | None


_CHAIN = _Shape(1, 1)
_FIRST_BRANCHES = 4
"""Outcomes of a row while the speed of neither device is known."""


@dataclass(frozen=True)
class _Batch:
    """The rows of a step, by size.

    may_wait: whether the next step waits for drafts: for those ahead if they are not complete, and
        after a miss for others. expected: tokens of a row by its number of drafts.
    """

    sizes: Mapping[RowSize, int]
    likeliest: Mapping[int, Likeliest]
    expected: Sequence[float]
    may_wait: bool

    @property
    def num_first(self) -> int:
        """Tokens of the pass that runs the drafts in flight."""
        return sum(count * (1 + size.num_drafts) for size, count in self.sizes.items())

    @property
    def num_rows(self) -> int:
        return sum(self.sizes.values())

    @property
    def most_levels(self) -> int:
        return max(size.num_next_tokens for size in self.sizes)

    def num_tokens(self, shape: _Shape) -> int:
        """Return the tokens of a pass that extends all branches."""
        return sum(count * size.num_branches(shape) for size, count in self.sizes.items())

    def hit_rate(self, shape: _Shape) -> float:
        """Return the mean probability that a row's outcome is among the shape's."""
        rates = (
            count * self.likeliest[size.num_drafts].hit_rate(size.num_branches(shape))
            for size, count in self.sizes.items()
        )
        return sum(rates) / self.num_rows

    def tokens(self, shape: _Shape) -> float:
        """Return the expected tokens of a row in the next step."""
        total = 0.0
        for size, count in self.sizes.items():
            hit = self.likeliest[size.num_drafts].hit_rate(size.num_branches(shape))
            missed = self.expected[size.num_next_tokens] if self.may_wait else 1.0
            total += count * (hit * self.expected[size.num_levels(shape)] + (1 - hit) * missed)
        return total / self.num_rows


class OutcomePlanner:
    """Plans the drafts ahead of a batch by the measured times of both models.

    first, levels: passes that run drafts in flight, and those that extend branches.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """clock: monotonic, in seconds."""
        self.outcomes = OutcomeStatistics()
        self.first = PassTimes()
        self.levels = PassTimes()
        self._clock = clock
        self._began_at_s: float | None = None
        self._target_s: float | None = None
        self._share = 1.0  # of the draft device's time that is there for this engine
        self._kind: _Kind | None = None
        self._shape: _Shape | None = None  # of steps of that kind
        self._likeliest: dict[int, Likeliest] = {}  # by number of drafts
        self._num_kept = 0

    def observe_passes(self, passes: Sequence[DraftPass], share: float = 1.0) -> None:
        """Record the passes of drafts ahead, in their order.

        share: as in AheadOutput.
        """
        self._share = share
        for index, each in enumerate(passes):
            (self.levels if index else self.first).observe(each)

    def begin_step(self) -> None:
        """Record that the target has received a step after which the draft model drafts."""
        self._began_at_s = self._clock()

    def end_step(self, *, is_lost: bool = False) -> None:
        """Record that the results of that step are known, or will never be.

        Call it after every step of the target, as soon as there are results: the time that passes
        until the next step is none of the target's.
        """
        began_at_s, self._began_at_s = self._began_at_s, None
        if began_at_s is None or is_lost:
            return
        seconds = self._clock() - began_at_s
        known = self._target_s
        self._target_s = seconds if known is None else _KEPT * known + (1 - _KEPT) * seconds

    def plan(
        self, rows: Sequence[RowSize], ahead: DraftAhead, *, may_wait: bool = False
    ) -> list[RowPlan]:
        """Return what to draft after each row.

        may_wait: as in SentRow, the same for all.
        """
        if not rows:
            return []
        most = MAX_TREE_NODES if ahead is DraftAhead.OUTCOMES else 1
        longest = max(each.num_next_tokens for each in rows)
        kind = _Kind(len(rows), longest, most, may_wait, self.levels.max_tokens)
        if kind != self._kind or self._num_kept >= _KEPT_STEPS:
            self._kind, self._shape, self._num_kept = kind, None, 0
            self._likeliest.clear()
        self._num_kept += 1
        for num_drafts in {each.num_drafts for each in rows} - self._likeliest.keys():
            self._likeliest[num_drafts] = self.outcomes.likeliest(num_drafts, most)
        if self._shape is None:
            expected = self.outcomes.expected_tokens(longest)
            self._shape = self._best(
                _Batch(Counter(rows), self._likeliest, expected, may_wait), most
            )
        plans = {size: _row_plan(size, self._shape, self._likeliest) for size in set(rows)}
        return [plans[size] for size in rows]

    def _best(self, batch: _Batch, most_branches: int) -> _Shape:
        """Return the shape with the most expected tokens per second; of equal ones the smallest."""
        target_s, most_tokens = self._target_s, self.levels.max_tokens
        if target_s is None or most_tokens is None:
            return _Shape(batch.most_levels, min(most_branches, _FIRST_BRANCHES))
        shapes = _candidates(batch, most_branches, most_tokens)
        return max(shapes, key=lambda shape: self._goodput(batch, shape, target_s))

    def _goodput(self, batch: _Batch, shape: _Shape, target_s: float) -> float:
        """Return the expected tokens of a row per second; 0 where its drafts would be late."""
        draft_s = self._draft_s(batch.num_first, batch.num_tokens(shape), shape.num_levels)
        if batch.may_wait:
            missed_s = self._draft_s(1, 1, batch.most_levels - 1)
            seconds = max(target_s, draft_s) + (1 - batch.hit_rate(shape)) * missed_s
            return batch.tokens(shape) / max(seconds, 1e-9)
        if draft_s > _USED_SHARE * target_s and shape != _CHAIN:
            return 0.0
        return batch.tokens(shape)

    def _draft_s(self, num_first: int, num_tokens: int, num_levels: int) -> float:
        """Return the seconds of a pass over drafts and of `num_levels` after it, until complete.

        They take longer on a device that other engines use too.
        """
        first_s, level_s = self.first.seconds(num_first), self.levels.seconds(num_tokens)
        return ((first_s or 0.0) + num_levels * (level_s or 0.0)) / self._share


def _candidates(batch: _Batch, most_branches: int, most_tokens: int) -> Iterator[_Shape]:
    """Yield chains of every length, and shapes of more outcomes whose passes have `most_tokens`."""
    for num_branches in _BRANCHES:
        for num_levels in range(1, batch.most_levels + 1):
            shape = _Shape(num_levels, num_branches)
            is_known = num_branches <= most_branches and batch.num_tokens(shape) <= most_tokens
            if num_branches == 1 or is_known:
                yield shape


def _row_plan(size: RowSize, shape: _Shape, likeliest: Mapping[int, Likeliest]) -> RowPlan:
    fan_out = likeliest[size.num_drafts].fan_out(size.num_branches(shape))
    return RowPlan(fan_out, size.num_levels(shape))
