"""One rank of a model in this process, and steps of any shape on it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.machine import num_usable_cores
from benchmarks.timed_runner import TimedRunner
from specdec.config.engine import DTypeName, EngineConfig
from specdec.config.quantization import QuantizationMethod
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.types.messages import BlockTableDelta, SequenceAdmission, StepInput, StepRow
from specdec.types.sampling.sampling_spec import SamplingRules
from specdec.worker import load_runner

_BLOCK_SIZE = 16
_PREFILL_TOKENS = 256
_TOKEN = 100


@dataclass(frozen=True)
class Precision:
    """Named weight and compute format of a model."""

    name: str
    dtype: DTypeName
    quantization: QuantizationMethod | None = None


PRECISIONS: Mapping[str, Precision] = {
    each.name: each
    for each in (
        Precision("fp32", "float32"),
        Precision("bf16", "bfloat16"),
        Precision("int8", "float32", "int8"),
        Precision("int8-bf16", "bfloat16", "int8"),  # the rest of the model, and KV, in 16 bits
        Precision("w8a8", "float32", "w8a8"),
        Precision("w8a8-bf16", "bfloat16", "w8a8"),
    )
}


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step: in total, and in the model's layers and logits."""

    step_s: float
    forward_s: float


class StepBench:
    """Target with `num_seqs` sequences of equal length whose last tokens are run repeatedly."""

    def __init__(
        self,
        directory: Path,
        precision: Precision,
        num_seqs: int,
        max_tokens: int,
        group: TensorParallelGroup | None = None,
        num_threads: int | None = None,
    ) -> None:
        """Load the model. max_tokens: maximum length of a sequence, including the tokens of a step.

        group: of which this is a rank; None for a single rank.
        num_threads: one per core by default.
        """
        torch.set_num_threads(num_threads or num_usable_cores())
        self._blocks_each = -(-max_tokens // _BLOCK_SIZE)
        self.model_config = ModelConfig.from_directory(directory)
        config = EngineConfig(
            max_model_len=self._blocks_each * _BLOCK_SIZE,
            num_blocks=self._blocks_each * num_seqs,
            block_size=_BLOCK_SIZE,
        )
        group = group or TensorParallelGroup()
        self._runner = load_runner(
            directory, precision.dtype, config, group, precision.quantization
        )
        self._lengths = [0] * num_seqs
        for seq_id in range(num_seqs):
            self._admit(seq_id)

    def extend(self, seq_id: int, length: int) -> None:
        """Prefill a sequence up to `length` tokens in chunks, unless it is that long already."""
        while (start := self._lengths[seq_id]) < length:
            end = min(length, start + _PREFILL_TOKENS)
            row = StepRow(seq_id, start, (_TOKEN,) * (end - start), 0, False)
            self._runner.execute(StepInput(0, (), (), (), (row,)))
            self._lengths[seq_id] = end

    def measure(
        self, num_seqs: int, num_drafts: int, parents: tuple[int, ...] | None = None
    ) -> StepTime:
        """Run one step of the first sequences with `num_drafts` drafts each; it has no effect.

        parents: the tree of the drafts; None for a chain.
        """
        tokens = (_TOKEN,) * (1 + num_drafts)
        rows = tuple(
            StepRow(seq_id, length, tokens, num_drafts, True, parents=parents)
            for seq_id, length in enumerate(self._lengths[:num_seqs])
        )
        with TimedRunner(self._runner) as timed:
            self._runner.execute(StepInput(0, (), (), (), rows))
        forward_s = (
            timed.seconds["model.forward"] + timed.seconds["model.compute_logits_and_argmax"]
        )
        return StepTime(timed.seconds["execute"], forward_s)

    def _admit(self, seq_id: int) -> None:
        first = seq_id * self._blocks_each
        table = BlockTableDelta(seq_id, 0, tuple(range(first, first + self._blocks_each)))
        admission = SequenceAdmission(seq_id, 1, SamplingRules(temperature=0.0))
        self._runner.execute(StepInput(0, (), (admission,), (table,), ()))


@dataclass(frozen=True)
class Shape:
    """Step of `num_seqs` sequences with `num_drafts` draft tokens each."""

    num_seqs: int
    num_drafts: int = 0

    @property
    def num_rows(self) -> int:
        return self.num_seqs * (1 + self.num_drafts)


@dataclass(frozen=True)
class ShapeTime:
    """Times of a shape over all rounds, in milliseconds; other load affects the best time least."""

    shape: Shape
    best_ms: float
    median_ms: float
    forward_ms: float  # layers and logits of the best step

    @property
    def outside_forward(self) -> float:
        """Share of the best step that is spent outside the model."""
        return 1 - self.forward_ms / self.best_ms


def measure_shapes(
    bench: StepBench, shapes: Sequence[Shape], num_rounds: int, name: str
) -> tuple[ShapeTime, ...]:
    """Measure all shapes in turn in each round, after a warm-up round."""
    times: dict[Shape, list[StepTime]] = {shape: [] for shape in shapes}
    for index in tqdm(range(num_rounds + 1), name, leave=False):
        for shape in shapes:
            time_ = bench.measure(shape.num_seqs, shape.num_drafts)
            if index > 0:
                times[shape].append(time_)
    return tuple(_shape_time(shape, each) for shape, each in times.items())


def _shape_time(shape: Shape, times: Sequence[StepTime]) -> ShapeTime:
    best = min(times, key=lambda each: each.step_s)
    return ShapeTime(
        shape=shape,
        best_ms=1000 * best.step_s,
        median_ms=1000 * statistics.median(each.step_s for each in times),
        forward_ms=1000 * best.forward_s,
    )
