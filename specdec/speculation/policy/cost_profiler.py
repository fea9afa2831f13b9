"""Cost profiler: measures steps on the loaded models before the first request."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, repeat
from typing import NamedTuple

from specdec.config.engine import EngineConfig
from specdec.speculation.policy.cost_model import CostTable
from specdec.types.messages import (
    BlockTableDelta,
    DraftRow,
    DraftStep,
    DraftWorker,
    SequenceAdmission,
    StepInput,
    StepRow,
    Target,
)
from specdec.types.sampling_spec import SamplingRules

_CONTEXT_TOKENS = 64
_TOKEN = 1
_BATCH_SIZES = (1, 4, 16, 64, 256, 1024)
_MAX_ROUNDS = 4


class ProfiledStep(NamedTuple):
    """Number of sequences in a step, and of draft tokens of each."""

    num_sequences: int
    num_draft_tokens: int

    @property
    def num_rows(self) -> int:
        """Tokens that a target runs."""
        return self.num_sequences * (1 + self.num_draft_tokens)


@dataclass(frozen=True)
class CostProfiler:
    """Profiler of steps with up to `most` draft tokens, on workers without sequences.

    The KV of its sequences is uninitialized, and in a small pool several share a block: the work is
    the same. They are numbered from 0 and released before an engine numbers its own from there.
    with_head: whether a head on the target's ranks drafts in the steps with drafts: trees, where
    they are configured, of more tokens than the longest chain.
    """

    config: EngineConfig
    most: int
    clock: Callable[[], float]
    with_head: bool = False

    def verification(self, target: Target, budget_s: float) -> CostTable:
        """Measure the target's steps for about `budget_s` seconds. Raise TargetFailedError."""
        seq_ids, start = self._seq_ids, self._context_tokens

        def run(step: StepInput) -> None:
            target.begin(step)
            target.collect()

        def verify(step: ProfiledStep) -> None:
            token_ids = (_TOKEN,) * (1 + step.num_draft_tokens)
            num_next = step.num_draft_tokens if self.with_head else 0
            tree_depth = _tree_depth(self.config)
            is_tree = tree_depth is not None and num_next > tree_depth
            rows = tuple(
                StepRow(
                    seq_id,
                    start,
                    token_ids,
                    step.num_draft_tokens,
                    samples=True,
                    num_next_drafts=num_next,
                    next_draft_depth=tree_depth if is_tree and tree_depth else 0,
                )
                for seq_id in seq_ids[: step.num_sequences]
            )
            run(StepInput(0, (), (), (), rows))

        run(StepInput(0, (), self._admitted, self._tables(self.config.num_blocks), ()))
        try:
            for rows in self._catch_up() if self.with_head else ():
                run(StepInput(0, (), (), (), rows))
            return self._measure(verify, budget_s, smallest=0)
        finally:
            run(StepInput(0, seq_ids, (), (), ()))

    def _catch_up(self) -> Iterator[tuple[StepRow, ...]]:
        """Yield rows by which a head with KV computes its KV of the context."""
        start, most_tokens = self._context_tokens, self.config.max_num_batched_tokens
        size = max(1, most_tokens // (start + 1))
        for first in range(0, len(self._seq_ids), size):
            rows = tuple(
                StepRow(seq_id, start, (_TOKEN,), 0, samples=True, num_next_drafts=1)
                for seq_id in self._seq_ids[first : first + size]
            )
            yield from repeat(rows, -(-(start + 1) // most_tokens))

    def drafting(self, worker: DraftWorker, num_blocks: int, budget_s: float) -> CostTable:
        """Measure the drafts of a model whose pool has `num_blocks`. Raise DraftFailedError."""
        seq_ids, start = self._seq_ids, self._context_tokens

        def draft(step: ProfiledStep) -> None:
            drafts = tuple(
                DraftRow(seq_id, start, (_TOKEN,), step.num_draft_tokens, start + 1)
                for seq_id in seq_ids[: step.num_sequences]
            )
            worker.begin(DraftStep(0, (), (), (), (), drafts))
            worker.collect()

        worker.begin(DraftStep(0, (), self._admitted, self._tables(num_blocks), (), ()))
        try:
            return self._measure(draft, budget_s, smallest=1)
        finally:
            worker.begin(DraftStep(0, seq_ids, (), (), (), ()))

    @property
    def _context_tokens(self) -> int:
        num_guesses = self.most * (2 if self.with_head else 1)
        return max(1, min(_CONTEXT_TOKENS, self.config.max_model_len - num_guesses - 1))

    @property
    def _seq_ids(self) -> tuple[int, ...]:
        return tuple(range(self.config.max_num_seqs))

    @property
    def _admitted(self) -> tuple[SequenceAdmission, ...]:
        num_tokens, rules = self._context_tokens, SamplingRules(temperature=0.0)
        token_ids = (_TOKEN,) * num_tokens
        return tuple(
            SequenceAdmission(seq_id, num_tokens, rules, token_ids) for seq_id in self._seq_ids
        )

    def _tables(self, num_blocks: int) -> tuple[BlockTableDelta, ...]:
        num_tokens = self._context_tokens + 1 + self.most * (2 if self.with_head else 1)
        length = math.ceil(num_tokens / self.config.block_size)
        return tuple(
            BlockTableDelta(
                seq_id,
                0,
                tuple((seq_id * length + index) % num_blocks for index in range(length)),
            )
            for seq_id in self._seq_ids
        )

    def _measure(
        self, run: Callable[[ProfiledStep], None], budget_s: float, *, smallest: int
    ) -> CostTable:
        """Return the table for `smallest` or more draft tokens."""
        steps = profiled_steps(self.config, self.most, smallest)
        return table_of(self._seconds(run, steps, budget_s), self.config, self.most, smallest)

    def _seconds(
        self, run: Callable[[ProfiledStep], None], steps: Sequence[ProfiledStep], budget_s: float
    ) -> dict[ProfiledStep, float]:
        """Return the minimum over a few rounds, since other load on the machine only adds time.

        The cheapest steps run first, since the budget may not suffice for all. The first round
        warms up each step, and counts only if the budget allows no other.
        """
        started_at_s, seconds = self.clock(), dict.fromkeys(steps, math.inf)
        for _ in range(_MAX_ROUNDS):
            for index, step in enumerate(steps):
                begun_at_s = self.clock()
                if index > 0 and begun_at_s - started_at_s > budget_s:
                    return {each: value for each, value in seconds.items() if value < math.inf}
                run(step)
                seconds[step] = min(seconds[step], self.clock() - begun_at_s)
        return seconds


def profiled_steps(config: EngineConfig, most: int, smallest: int) -> list[ProfiledStep]:
    """Return the steps to measure, with `smallest` to `most` draft tokens, cheapest first."""
    each_size = product(_sizes(config), _counts(config, most, smallest))
    steps = [ProfiledStep(size, count) for size, count in each_size]
    steps = [each for each in steps if each.num_rows <= config.max_num_batched_tokens]
    return sorted(steps, key=lambda step: (step.num_rows, step.num_draft_tokens))


def table_of(
    measured: Mapping[ProfiledStep, float], config: EngineConfig, most: int, smallest: int
) -> CostTable:
    """Return the table of measured seconds.

    Steps without a measurement cost the largest measured one's time a row.
    """
    largest = max(measured, key=lambda step: step.num_rows)
    row_s = measured[largest] / largest.num_rows

    def cost(step: ProfiledStep) -> float:
        # A clock may be too coarse to see a step at all.
        return max(measured.get(step, row_s * step.num_rows), 1e-9)

    sizes, counts = _sizes(config), _counts(config, most, smallest)
    seconds = tuple(tuple(cost(ProfiledStep(size, count)) for count in counts) for size in sizes)
    return CostTable(sizes, counts, seconds)


def _sizes(config: EngineConfig) -> tuple[int, ...]:
    largest = config.max_num_seqs
    return (*(size for size in _BATCH_SIZES if size < largest), largest)


def _counts(config: EngineConfig, most: int, smallest: int) -> tuple[int, ...]:
    """Return the numbers of draft tokens to measure: of chains, and of the tree if there is one."""
    tree_depth = _tree_depth(config)
    between = most // 2 if tree_depth is None else tree_depth
    return tuple(sorted({n for n in (0, 1, between, most) if n >= smallest}))


def _tree_depth(config: EngineConfig) -> int | None:
    """Return the depth of trees, which is the length of the longest chain; None without trees."""
    speculation = config.speculation
    if speculation is None or not speculation.num_draft_tree_tokens:
        return None
    return speculation.num_speculative_tokens


def with_engine(
    steps: CostTable, engine: CostTable, *, overlaps: bool, holds_drafts: bool = False
) -> CostTable:
    """Add the engine's own seconds, in which the target waits.

    overlaps: whether the engine works during a forward pass behind a step without draft tokens, as
    with asynchronous scheduling. Then the longer one of the two counts for these steps.
    holds_drafts: whether also behind draft tokens, since the target's ranks hold the next ones.
    """

    def whole(size: int, count: int, value: float) -> float:
        engine_s = engine.step_s(size, count)
        is_hidden = overlaps and (count == 0 or holds_drafts)
        return max(value, engine_s) if is_hidden else value + engine_s

    return steps.mapped(whole)


def with_drafting(verification: CostTable, drafting: CostTable) -> CostTable:
    """Return the sum of both tables; without draft tokens the draft model does not run."""
    return verification.mapped(
        lambda size, count, value: value + (drafting.step_s(size, count) if count else 0.0)
    )
