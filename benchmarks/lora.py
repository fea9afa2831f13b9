"""Measure what LoRA adapters cost beside a step of their model, on native CPU kernels.

Sixteen streams of SmolLM2 after 128 tokens, with random adapters of all linear layers. A step is a
forward pass of one row of each stream with its logits. Cases differ in how many adapters the rows
have: none, one for all, and two or sixteen different ones. In those with a draft head, EAGLE-3 of
random weights, a step verifies four drafts of each stream and makes the next four; the head alone
has adapters. A share is the median over the rounds of (time of the case / time without adapters in
that round). The last line printed is JSON.

Each round runs all cases in a new random order, each after a step that is not timed. The model is
loaded several times, since times depend on the place of weights in memory.

    python -m benchmarks.lora [--threads 2] [--rounds 60] [--loads 3] [--cpu-time]
        [--output FILE]

Use --cpu-time with one thread on a shared machine to measure CPU time instead of wall time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import numpy as np
import torch

from benchmarks.bystanders import CpuUsage
from benchmarks.machine import Machine, describe_machine
from benchmarks.precisions import PRECISIONS, Precision
from benchmarks.random_adapters import write_adapter, write_eagle3_adapter
from benchmarks.random_heads import write_eagle3
from benchmarks.report_file import add_output, parse_options, write_report
from benchmarks.summary import Bar, at_most, print_bars
from benchmarks.workloads import MODEL
from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch, PairInputs
from specdec.kernels.reference.sample_rows import SAMPLE_PARAMS
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.dtypes import DTYPES
from specdec.models.heads.config import HeadConfig
from specdec.models.heads.loading import load_head
from specdec.models.heads.networks.base import WholeDraftHead
from specdec.models.loading import load_model
from specdec.models.lora.peft import AdapterFiles
from specdec.models.lora.updates import load_adapter
from specdec.models.resolve import print_progress, resolve
from specdec.worker.head.adapters import HeadAdapters

_PRECISIONS = ("fp32", "bf16", "int8")
_NUM_STREAMS, _CONTEXT, _BLOCK_SIZE = 16, 128, 16
_NUM_WARM_UP, _NUM_DRAFTS = 3, 4

PLAIN = "no adapter"
CASES: Mapping[str, tuple[int, ...]] = {
    PLAIN: (0,) * _NUM_STREAMS,
    "1 adapter of rank 16": (1,) * _NUM_STREAMS,
    "1 adapter of rank 16, for half of the streams": (0,) * 8 + (1,) * 8,
    "2 adapters of rank 16": (1,) * 8 + (2,) * 8,
    "16 adapters of rank 16": tuple(range(1, 17)),
}
"""Adapter of each stream, 0 for none."""

HEAD_PLAIN = "drafts of a head, no adapter"
HEAD_CASES: Mapping[str, tuple[int, ...]] = {
    HEAD_PLAIN: (0,) * _NUM_STREAMS,
    "drafts of a head, 16 adapters of it of rank 16": tuple(range(1, 17)),
}
"""Adapter of the head for each stream, 0 for none."""

_LIMITS = {"1 adapter of rank 16": 1.12, "drafts of a head, 16 adapters of it of rank 16": 1.15}
"""Most time of a case, as a share of that without adapters."""


@dataclass(frozen=True)
class LoraRow:
    """Medians of one case. share: of the time without adapters."""

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
    rows: tuple[LoraRow, ...]
    bars: tuple[Bar, ...]


class LoraBench:
    """A model with adapters, and a batch for each case."""

    def __init__(
        self,
        directory: Path,
        adapters: Sequence[Path],
        precision: Precision,
        head_dir: Path,
        head_adapters: Sequence[Path],
    ) -> None:
        """adapters: under the ids from 1 on. head_dir, head_adapters: likewise, of the head."""
        config = ModelConfig.from_directory(directory)
        self._model = load_model(
            directory,
            config,
            TensorParallelGroup(),
            dtype=DTYPES[precision.dtype],
            max_model_len=_CONTEXT + _BLOCK_SIZE,
            block_size=_BLOCK_SIZE,
            quantization=precision.quantization,
            kernels="native",
        )
        store = self._model.enable_adapters()
        for adapter_id, path in enumerate(adapters, start=1):
            load_adapter(store, adapter_id, AdapterFiles.read(path, 16))
        head = HeadConfig.from_directory(head_dir, config)
        self._head = load_head(head, self._model, precision.quantization)
        self._of_head = HeadAdapters(self._model.dtype)
        self._of_head.serve(self._head, head)
        for adapter_id, path in enumerate(head_adapters, start=1):
            self._of_head.load(adapter_id, AdapterFiles.read(path, 16))
        blocks = _CONTEXT // _BLOCK_SIZE + 1
        self._tables = torch.randperm(_NUM_STREAMS * blocks).view(_NUM_STREAMS, blocks).tolist()
        num_slots = _NUM_STREAMS * blocks * _BLOCK_SIZE
        self._cache = self._model.new_kv_cache(num_slots)
        self._head_cache = self._head.new_kv_cache(num_slots)

    def cases(self) -> dict[str, Callable[[], object]]:
        """Return a step for each case, by name."""
        plain = {name: self._step(adapter_ids) for name, adapter_ids in CASES.items()}
        return plain | {name: self._head_step(ids) for name, ids in HEAD_CASES.items()}

    def _step(self, adapter_ids: Sequence[int]) -> Callable[[], object]:
        rows = zip(self._tables, adapter_ids, strict=True)
        chunks = [Chunk([100], _CONTEXT, table, adapter_id=each) for table, each in rows]
        batch = ForwardBatch(chunks, _BLOCK_SIZE)
        return lambda: self._model.compute_logits(self._model(batch, self._cache))

    def _head_step(self, adapter_ids: Sequence[int]) -> Callable[[], object]:
        model, head, cache = self._model, cast(WholeDraftHead, self._head), self._head_cache
        chunks = [Chunk([100] * (1 + _NUM_DRAFTS), _CONTEXT, table) for table in self._tables]
        rows, slot = ForwardBatch(chunks, _BLOCK_SIZE), _CONTEXT + 1 + _NUM_DRAFTS
        owners = zip(self._tables, adapter_ids, strict=True)
        pairs = ForwardBatch(
            [Chunk([100], slot, table, adapter_id=each) for table, each in owners], _BLOCK_SIZE
        )
        counts, params = [_NUM_DRAFTS] * _NUM_STREAMS, np.zeros(_NUM_STREAMS, SAMPLE_PARAMS)

        def run() -> object:
            hidden, tapped = model.forward_with_taps(rows, self._cache, head.taps)
            model.compute_logits(hidden)
            features = head.features(tapped[rows.last_tokens], pairs.adapter_runs)
            assert cache is not None
            return head.draft(PairInputs(pairs, features, cache), counts, params)

        return run


def measure(
    cases: Mapping[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float],
    order: random.Random,
    timed: dict[str, list[float]],
) -> None:
    """Run all cases in each round, and add their seconds to `timed`, by name; order: of cases.

    The first rounds do not count.
    """
    for index in range(_NUM_WARM_UP + rounds):
        for name in order.sample(list(cases), len(cases)):
            cases[PLAIN]()
            began_at = clock()
            cases[name]()
            if index >= _NUM_WARM_UP:
                timed.setdefault(name, []).append(clock() - began_at)


def summarize(precision: str, timed: Mapping[str, Sequence[float]]) -> list[LoraRow]:
    """Return the medians of all cases, in their order."""
    return [
        LoraRow(
            precision,
            name,
            1e3 * statistics.median(timed[name]),
            statistics.median(a / b for a, b in zip(timed[name], timed[plain], strict=True)),
        )
        for plain, cases in ((PLAIN, CASES), (HEAD_PLAIN, HEAD_CASES))
        for name in cases
    ]


def bars(rows: Sequence[LoraRow]) -> tuple[Bar, ...]:
    """Return the shares that have a limit."""
    return tuple(
        at_most(f"{row.case} / {PLAIN}, {row.precision}", row.share, _LIMITS[row.case])
        for row in rows
        if row.case in _LIMITS
    )


def measure_loads(options: argparse.Namespace, directory: Path) -> list[LoraRow]:
    """Load the model several times, and return the medians over the rounds of all loads."""
    clock = time.thread_time if options.cpu_time else time.perf_counter
    order, rounds = random.Random(0), -(-options.rounds // options.loads)
    timed: dict[str, dict[str, list[float]]] = {name: {} for name in _PRECISIONS}
    with TemporaryDirectory() as root, torch.inference_mode():
        config = ModelConfig.from_directory(directory)
        places = [
            (Path(root) / name, i) for i in range(_NUM_STREAMS) for name in (f"a{i}", f"h{i}")
        ]
        adapters = [write_adapter(path, config, 16, i) for path, i in places[::2]]
        of_head = [write_eagle3_adapter(path, config, 16, i) for path, i in places[1::2]]
        head = write_eagle3(Path(root) / "head", config)
        for _ in range(options.loads):
            for name in order.sample(_PRECISIONS, len(_PRECISIONS)):
                bench = LoraBench(directory, adapters, PRECISIONS[name], head, of_head)
                measure(bench.cases(), rounds, clock, order, timed[name])
    return [row for name, each in timed.items() for row in summarize(name, each)]


def print_table(rows: Sequence[LoraRow]) -> None:
    """Print one line per case, with its limit."""
    for row in rows:
        limit = _LIMITS.get(row.case)
        bound = "" if limit is None else f", at most {100 * limit:g} %"
        print(f"{row.precision:6}{row.case:48}{row.ms:8.3f} ms{100 * row.share:7.1f} %{bound}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table, the bars and one line of JSON; return exit status 0."""
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    before = CpuUsage.now()
    rows = measure_loads(options, resolve(MODEL, progress=print_progress))
    print_table(rows)
    print_bars(bars(rows))
    report = Report(
        options.command,
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


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.lora", description="Measure LoRA adapters beside their model."
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60, help="over all loads")
    parser.add_argument("--loads", type=int, default=3, help="how often the model is loaded")
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time of one thread")
    add_output(parser, "lora")
    options = parse_options(parser, arguments)
    if options.cpu_time and options.threads != 1:
        parser.error("--cpu-time needs --threads 1")
    if not 1 <= options.loads <= options.rounds:
        parser.error("--loads must be at least 1 and at most --rounds")
    return options


if __name__ == "__main__":
    sys.exit(main())
