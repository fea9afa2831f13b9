"""Measures what steps cost, on the models that will run them, before the first request comes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdec.config.engine import EngineConfig
from specdec.speculation.policy.cost_model import CostTable
from specdec.types.messages import (
    BlockTableDelta,
    DraftRow,
    DraftStep,
    SequenceAdmission,
    StepInput,
    StepRow,
)
from specdec.types.sampling_spec import SamplingRules
from specdec.types.worker import DraftWorker, Target

_CONTEXT_TOKENS = 64
_TOKEN = 1
_BATCH_SIZES = (1, 4, 16, 64, 256, 1024)
_MAX_ROUNDS = 4


@dataclass(frozen=True)
class Shape:
    """So many sequences with so many draft tokens each."""

    num_sequences: int
    num_draft_tokens: int

    @property
    def num_rows(self) -> int:
        """Tokens that a target runs."""
        return self.num_sequences * (1 + self.num_draft_tokens)


@dataclass(frozen=True)
class _Batch:
    """Sequences for measuring, of which the workers are told in the first step.

    Their KV is whatever their blocks hold, and where the pool is small several share a block: the
    work is the same. They are numbered from 0, and gone before an engine counts its own from there.
    """

    config: EngineConfig
    num_sequences: int
    most: int

    @property
    def context_tokens(self) -> int:
        return max(1, min(_CONTEXT_TOKENS, self.config.max_model_len - self.most - 1))

    @property
    def seq_ids(self) -> tuple[int, ...]:
        return tuple(range(self.num_sequences))

    @property
    def admitted(self) -> tuple[SequenceAdmission, ...]:
        rules = SamplingRules(temperature=0.0)
        return tuple(
            SequenceAdmission(seq_id, self.context_tokens, rules) for seq_id in self.seq_ids
        )

    def tables(self, num_blocks: int, block_size: int) -> tuple[BlockTableDelta, ...]:
        length = math.ceil((self.context_tokens + 1 + self.most) / block_size)
        return tuple(
            BlockTableDelta(
                seq_id,
                0,
                tuple((seq_id * length + index) % num_blocks for index in range(length)),
            )
            for seq_id in self.seq_ids
        )


def measure_verification(
    target: Target,
    config: EngineConfig,
    most: int,
    clock: Callable[[], float],
    budget_s: float,
) -> CostTable:
    """Seconds of the target's steps with up to `most` draft tokens, within some `budget_s` seconds.

    Raises TargetFailedError. The target knows of no sequence before and after.
    """
    batch = _Batch(config, config.max_num_seqs, most)
    tables = batch.tables(config.num_blocks, config.block_size)

    def run(step: StepInput) -> None:
        target.begin(step)
        target.collect()

    def verify(shape: Shape) -> None:
        token_ids = (_TOKEN,) * (1 + shape.num_draft_tokens)
        rows = tuple(
            StepRow(seq_id, batch.context_tokens, token_ids, shape.num_draft_tokens, samples=True)
            for seq_id in batch.seq_ids[: shape.num_sequences]
        )
        run(StepInput(0, (), (), (), rows))

    run(StepInput(0, (), batch.admitted, tables, ()))
    try:
        shapes = _shapes(config, most, smallest=0)
        return _table(_measure(verify, shapes, clock, budget_s), config, most, smallest=0)
    finally:
        run(StepInput(0, batch.seq_ids, (), (), ()))


def measure_drafting(
    worker: DraftWorker,
    config: EngineConfig,
    num_blocks: int,
    most: int,
    clock: Callable[[], float],
    budget_s: float,
) -> CostTable:
    """The same of a draft model, whose pool has `num_blocks`. Raises DraftFailedError."""
    batch = _Batch(config, config.max_num_seqs, most)
    tables = batch.tables(num_blocks, config.block_size)
    start = batch.context_tokens

    def draft(shape: Shape) -> None:
        drafts = tuple(
            DraftRow(seq_id, start, (_TOKEN,), shape.num_draft_tokens, start + 1)
            for seq_id in batch.seq_ids[: shape.num_sequences]
        )
        worker.begin(DraftStep(0, (), (), (), (), drafts))
        worker.collect()

    worker.begin(DraftStep(0, (), batch.admitted, tables, (), ()))
    try:
        shapes = _shapes(config, most, smallest=1)
        return _table(_measure(draft, shapes, clock, budget_s), config, most, smallest=1)
    finally:
        worker.begin(DraftStep(0, batch.seq_ids, (), (), (), ()))


def with_drafting(verification: CostTable, drafting: CostTable) -> CostTable:
    """Both after each other; without draft tokens the draft model has nothing to do."""
    seconds = tuple(
        tuple(
            value + (drafting.step_s(size, count) if count else 0.0)
            for count, value in zip(verification.draft_tokens, row, strict=True)
        )
        for size, row in zip(verification.batch_sizes, verification.seconds, strict=True)
    )
    return CostTable(verification.batch_sizes, verification.draft_tokens, seconds)


def _batch_sizes(config: EngineConfig) -> tuple[int, ...]:
    sizes = [size for size in _BATCH_SIZES if size < config.max_num_seqs]
    return (*sizes, config.max_num_seqs)


def _lengths(most: int, smallest: int) -> tuple[int, ...]:
    return tuple(sorted({count for count in (0, 1, most // 2, most) if count >= smallest}))


def _shapes(config: EngineConfig, most: int, smallest: int) -> list[Shape]:
    """Those that a step has room for, the cheapest first: time may not do for all."""
    shapes = (
        Shape(size, count) for size in _batch_sizes(config) for count in _lengths(most, smallest)
    )
    fitting = [shape for shape in shapes if shape.num_rows <= config.max_num_batched_tokens]
    return sorted(fitting, key=lambda shape: (shape.num_rows, shape.num_draft_tokens))


def _measure(
    run: Callable[[Shape], None],
    shapes: Sequence[Shape],
    clock: Callable[[], float],
    budget_s: float,
) -> dict[Shape, float]:
    """The least seconds of a few rounds: what else a machine does can only add to them.

    The first round warms up what a shape needs, and counts only where there is time for no other.
    """
    started_at_s, seconds = clock(), dict.fromkeys(shapes, math.inf)
    for _ in range(_MAX_ROUNDS):
        for index, shape in enumerate(shapes):
            begun_at_s = clock()
            if index > 0 and begun_at_s - started_at_s > budget_s:
                return {each: value for each, value in seconds.items() if value < math.inf}
            run(shape)
            seconds[shape] = min(seconds[shape], clock() - begun_at_s)
    return seconds


def _table(
    measured: dict[Shape, float], config: EngineConfig, most: int, *, smallest: int
) -> CostTable:
    """With what could not be measured set to cost by its rows what the largest measured one did."""
    largest = max(measured, key=lambda shape: shape.num_rows)
    row_s = measured[largest] / largest.num_rows

    def cost(shape: Shape) -> float:
        # A clock may be too coarse to see a step at all.
        return max(measured.get(shape, row_s * shape.num_rows), 1e-9)

    sizes, lengths = _batch_sizes(config), _lengths(most, smallest)
    seconds = tuple(tuple(cost(Shape(size, count)) for count in lengths) for size in sizes)
    return CostTable(sizes, lengths, seconds)
