"""Measure what draft heads cost beside a step of their target, on native CPU kernels.

One stream of SmolLM2 behind 128 tokens, with heads of its sizes, a draft vocabulary of 8192 and
random weights, in float32 (16-bit weights) and int8. A target's step is a forward pass of one row
with its logits and their argmax. All cases take turns; a share is the median over the rounds of
(time of the case / time of the target's step in that round). The last line printed is JSON.

    python -m benchmarks.heads [--threads 2] [--rounds 60] [--cpu-time] [--output FILE]

Use --cpu-time with one thread on a shared machine to measure CPU time instead of wall time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.bystanders import CpuUsage
from benchmarks.machine import Machine, describe_machine
from benchmarks.random_heads import write_eagle3, write_medusa
from benchmarks.report_file import add_output, command_line, write_report
from benchmarks.summary import Bar, at_most, print_bars
from benchmarks.workloads import MODEL
from specdec.config.quantization import QuantizationMethod
from specdec.distributed.group import TensorParallelGroup
from specdec.kernels.forward_batch import Chunk, ModelInput
from specdec.kernels.sample import SampleParams, row_argmax
from specdec.models.config import ModelConfig
from specdec.models.heads.base import DraftHead, WholeDraftHead
from specdec.models.heads.config import HeadConfig
from specdec.models.heads.loading import load_head
from specdec.models.loading import load_model
from specdec.models.resolve import print_progress, resolve
from specdec.sampling.sampler import SamplingBatch

_BLOCK_SIZE = 16
_NUM_BLOCKS = 16
_CONTEXT = 128
_NUM_DRAFTS = 4
_TARGET = "target step"

_PRECISIONS: Mapping[str, QuantizationMethod | None] = {"fp32": None, "int8": "int8"}

_LIMITS = {
    ("fp32", "eagle3 draft token"): 0.08,
    ("int8", "eagle3 draft token"): 0.12,
    ("fp32", "medusa, 5 heads"): 0.12,
    ("int8", "medusa, 5 heads"): 0.12,
    ("fp32", "medusa, 5 heads in int8"): 0.12,
    ("fp32", "medusa, 5 heads, one output head"): 0.12,
    ("int8", "medusa, 5 heads, one output head"): 0.12,
}
"""Most time of a case as a share of the target's step."""

Work = Callable[[], object]


@dataclass(frozen=True)
class HeadRow:
    """Medians of one case. share: of the time of a target's step."""

    precision: str
    case: str
    ms: float
    share: float


@dataclass(frozen=True)
class Report:
    """JSON report. others_percent: CPU usage of other processes, in percent of one core."""

    command: str
    machine: Machine
    model: str
    num_threads: int
    is_cpu_time: bool
    others_percent: float
    rows: tuple[HeadRow, ...]
    bars: tuple[Bar, ...]


class HeadBench:
    """A target and heads beside it, in one precision."""

    def __init__(self, heads: Path, quantization: QuantizationMethod | None) -> None:
        """Load the model, and the heads in the folders of `heads`."""
        directory = resolve(MODEL, progress=print_progress)
        self._config = ModelConfig.from_directory(directory)
        self._target = load_model(
            directory,
            self._config,
            TensorParallelGroup(),
            dtype=torch.float32,
            max_model_len=_NUM_BLOCKS * _BLOCK_SIZE,
            block_size=_BLOCK_SIZE,
            quantization=quantization,
            kernels="native",
        )
        self._cache = self._target.new_kv_cache(_NUM_BLOCKS * _BLOCK_SIZE).normal_()
        self._heads = {path.name: self._load(path, quantization) for path in heads.iterdir()}
        self._medusa_int8 = None if quantization else self._load(heads / "medusa", "int8")

    def cases(self) -> dict[str, tuple[Work, int]]:
        """Return the work of each case, and how often it repeats what is measured."""
        eagle3 = self._heads["eagle3"]
        assert isinstance(eagle3, WholeDraftHead)
        cases: dict[str, tuple[Work, int]] = {
            _TARGET: (self._target_step, 1),
            "eagle3 draft token": (self._whole_draft(eagle3, 0.0), _NUM_DRAFTS),
            "eagle3 draft token, temperature 0.8": (self._whole_draft(eagle3, 0.8), _NUM_DRAFTS),
            "eagle3 draft token, a call for each": (self._steps(eagle3), _NUM_DRAFTS),
            "medusa, 5 heads": (self._steps(self._heads["medusa"]), 1),
            "medusa, 5 heads, one output head": (self._steps(self._heads["medusa-shared"]), 1),
        }
        if self._medusa_int8 is not None:
            cases["medusa, 5 heads in int8"] = (self._steps(self._medusa_int8), 1)
        return cases

    def _load(self, directory: Path, quantization: QuantizationMethod | None) -> DraftHead:
        config = HeadConfig.from_directory(directory, self._config)
        return load_head(config, self._target, quantization)

    def _target_step(self) -> None:
        hidden = self._target(_one_row(), self._cache)
        self._target.compute_logits_and_argmax(hidden)

    def _whole_draft(self, head: WholeDraftHead, temperature: float) -> Work:
        cache = head.new_kv_cache(_NUM_BLOCKS * _BLOCK_SIZE)
        assert cache is not None
        cache.normal_()
        features, params = torch.randn(1, head.feature_size), _params(temperature)
        return lambda: head.draft(_one_row(), features, cache, [_NUM_DRAFTS], params)

    def _steps(self, head: DraftHead) -> Work:
        cache = head.new_kv_cache(_NUM_BLOCKS * _BLOCK_SIZE)
        if cache is not None:
            cache.normal_()
        count = head.max_draft_tokens or _NUM_DRAFTS
        features = torch.randn(1, head.feature_size)

        def draft() -> None:
            state = head.begin(_one_row(), features, cache, count)
            for index in range(count):
                argmax = row_argmax(head.logits(state, index))
                if index + 1 < count:
                    state = head.advance(state, argmax.token_ids.tolist(), index)

        return draft


def _one_row() -> ModelInput:
    return ModelInput([Chunk([100], _CONTEXT, range(_NUM_BLOCKS))], _BLOCK_SIZE)


def _params(temperature: float) -> SampleParams:
    return SamplingBatch.from_lists(
        temperatures=[temperature],
        top_k=[0],
        top_p=[1.0],
        min_p=[0.0],
        seeds=[1],
        choices=[0],
        positions=[_CONTEXT],
    ).params


def measure(
    precision: str,
    cases: Mapping[str, tuple[Work, int]],
    rounds: int,
    clock: Callable[[], float],
) -> list[HeadRow]:
    """Return the medians of all cases, which take turns, without the first rounds."""
    num_warm_up = 3
    seconds: dict[str, list[float]] = {case: [] for case in cases}
    for _ in range(num_warm_up + rounds):
        for case, (work, count) in cases.items():
            began_at = clock()
            work()
            seconds[case].append((clock() - began_at) / count)
    target = seconds[_TARGET][num_warm_up:]
    return [
        HeadRow(precision, case, 1e3 * statistics.median(own), _median_ratio(own, target))
        for case, own in ((case, each[num_warm_up:]) for case, each in seconds.items())
    ]


def _median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def bars(rows: Sequence[HeadRow]) -> tuple[Bar, ...]:
    """Return the shares that have a limit."""
    return tuple(
        at_most(f"{row.case} / target step, {row.precision}", row.share, limit)
        for row in rows
        if (limit := _LIMITS.get((row.precision, row.case))) is not None
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table, the bars and one line of JSON; return exit status 0."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = _options(given)
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.cpu_time else time.perf_counter
    before, rows = CpuUsage.now(), list[HeadRow]()
    with TemporaryDirectory() as directory, torch.inference_mode():
        _write_heads(Path(directory))
        for precision, quantization in _PRECISIONS.items():
            bench = HeadBench(Path(directory), quantization)
            rows += measure(precision, bench.cases(), options.rounds, clock)
    for row in rows:
        print(f"{row.precision:6}{row.case:40}{row.ms:8.3f} ms{100 * row.share:8.1f} %")
    print_bars(bars(rows))
    report = Report(
        command_line("benchmarks.heads", given),
        describe_machine(),
        MODEL,
        options.threads,
        options.cpu_time,
        CpuUsage.now().others_percent_since(before),
        tuple(rows),
        bars(rows),
    )
    write_report(report, options.output)
    return 0


def _write_heads(directory: Path) -> None:
    torch.manual_seed(0)
    target = ModelConfig.from_directory(resolve(MODEL, progress=print_progress))
    write_eagle3(directory / "eagle3", target)
    write_medusa(directory / "medusa", target, is_shared=False)
    write_medusa(directory / "medusa-shared", target, is_shared=True)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.heads", description="Measure draft heads beside their target."
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time of one thread")
    add_output(parser, "heads")
    options = parser.parse_args(arguments)
    if options.cpu_time and options.threads != 1:
        parser.error("--cpu-time needs --threads 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
