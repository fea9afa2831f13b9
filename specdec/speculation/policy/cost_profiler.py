"""Cost profiler: measures steps on the loaded models before the first request."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdec.config.engine import EngineConfig
from specdec.speculation.policy.cost_model import CostTable
from specdec.types.draft_decision import DraftShape, chain
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


@dataclass(frozen=True)
class StepShape:
    """Number of sequences in a step, and the draft shape of each."""

    num_sequences: int
    draft: DraftShape

    @property
    def num_rows(self) -> int:
        """Tokens that a target runs."""
        return self.num_sequences * (1 + self.draft.num_draft_tokens)


@dataclass(frozen=True)
class _Batch:
    """Sequences to profile with, which the workers admit in the first step.

    Their KV is uninitialized, and in a small pool several share a block: the work is the same. They
    are numbered from 0 and released before an engine numbers its own from there.
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


def profile_verification(
    target: Target,
    config: EngineConfig,
    most: int,
    clock: Callable[[], float],
    budget_s: float,
) -> CostTable:
    """Measure the target's steps with up to `most` draft tokens, for about `budget_s` seconds.

    Raise TargetFailedError. The target has no sequences before and after.
    """
    batch = _Batch(config, config.max_num_seqs, most)
    tables = batch.tables(config.num_blocks, config.block_size)

    def run(step: StepInput) -> None:
        target.begin(step)
        target.collect()

    def verify(shape: StepShape) -> None:
        num_drafts = shape.draft.num_draft_tokens
        token_ids = (_TOKEN,) * (1 + num_drafts)
        rows = tuple(
            StepRow(seq_id, batch.context_tokens, token_ids, num_drafts, samples=True)
            for seq_id in batch.seq_ids[: shape.num_sequences]
        )
        run(StepInput(0, (), (), (), rows))

    run(StepInput(0, (), batch.admitted, tables, ()))
    try:
        shapes = _shapes(config, most, smallest=0)
        return _table(_measure(verify, shapes, clock, budget_s), config, most, smallest=0)
    finally:
        run(StepInput(0, batch.seq_ids, (), (), ()))


def profile_drafting(
    worker: DraftWorker,
    config: EngineConfig,
    num_blocks: int,
    most: int,
    clock: Callable[[], float],
    budget_s: float,
) -> CostTable:
    """Measure the drafts of a model whose pool has `num_blocks`. Raise DraftFailedError."""
    batch = _Batch(config, config.max_num_seqs, most)
    tables = batch.tables(num_blocks, config.block_size)
    start = batch.context_tokens

    def draft(shape: StepShape) -> None:
        drafts = tuple(
            DraftRow(seq_id, start, (_TOKEN,), shape.draft.num_draft_tokens, start + 1)
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
    """Return the sum of both tables; without draft tokens the draft model does not run."""
    seconds = tuple(
        tuple(
            value + (drafting.step_s(size, shape) if shape.num_draft_tokens else 0.0)
            for shape, value in zip(verification.shapes, row, strict=True)
        )
        for size, row in zip(verification.batch_sizes, verification.seconds, strict=True)
    )
    return CostTable(verification.batch_sizes, verification.shapes, seconds)


def _batch_sizes(config: EngineConfig) -> tuple[int, ...]:
    sizes = [size for size in _BATCH_SIZES if size < config.max_num_seqs]
    return (*sizes, config.max_num_seqs)


def _draft_shapes(most: int, smallest: int) -> tuple[DraftShape, ...]:
    lengths = {count for count in (0, 1, most // 2, most) if count >= smallest}
    return tuple(map(chain, sorted(lengths)))


def _shapes(config: EngineConfig, most: int, smallest: int) -> list[StepShape]:
    """Return the steps that fit, the cheapest first, since the budget may not suffice for all."""
    shapes = (
        StepShape(size, draft)
        for size in _batch_sizes(config)
        for draft in _draft_shapes(most, smallest)
    )
    fitting = [shape for shape in shapes if shape.num_rows <= config.max_num_batched_tokens]
    return sorted(fitting, key=lambda shape: (shape.num_rows, shape.draft.num_draft_tokens))


def _measure(
    run: Callable[[StepShape], None],
    shapes: Sequence[StepShape],
    clock: Callable[[], float],
    budget_s: float,
) -> dict[StepShape, float]:
    """Return the minimum over a few rounds, since other load on the machine only adds time.

    The first round warms up each shape, and counts only if the budget allows no other.
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
    measured: dict[StepShape, float], config: EngineConfig, most: int, *, smallest: int
) -> CostTable:
    """Return the table; shapes without a measurement cost the largest measured one's time a row."""
    largest = max(measured, key=lambda shape: shape.num_rows)
    row_s = measured[largest] / largest.num_rows

    def cost(shape: StepShape) -> float:
        # A clock may be too coarse to see a step at all.
        return max(measured.get(shape, row_s * shape.num_rows), 1e-9)

    sizes, drafts = _batch_sizes(config), _draft_shapes(most, smallest)
    seconds = tuple(tuple(cost(StepShape(size, draft)) for draft in drafts) for size in sizes)
    return CostTable(sizes, drafts, seconds)
