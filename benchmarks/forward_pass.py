"""Measure a forward pass on the CPU: native kernels, torch, and the memory floor.

Each case is a batch of SmolLM2 with random KV. Both implementations take turns; a figure is the
median over the rounds. The floor is the time to read the weights of the linear layers and the KV at
the bandwidth of a sum over a large buffer, measured in each round. The output head is excluded. The
last line printed is JSON.

    python -m benchmarks.forward_pass [--dtype float32] [--quantization int8] [--threads 2]
        [--rounds 15] [--cpu-time] [--output FILE]

Use --cpu-time with one thread on a shared machine to measure CPU time instead of wall time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from benchmarks.bystanders import CpuUsage
from benchmarks.bytes_moved import held_bytes
from benchmarks.cpu_time import add_cpu_time, require_one_thread
from benchmarks.machine import Machine, describe_machine
from benchmarks.report_file import add_output, write_report
from benchmarks.workloads import MODEL
from specdec.config.engine import DTypeName, Kernels
from specdec.config.quantization import QuantizationMethod
from specdec.kernels.reference.forward_batch import Chunk, ModelInput
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.dtypes import DTYPES
from specdec.models.loading import Decoder, load_model
from specdec.models.resolve import resolve

_BLOCK_SIZE = 16
_MAX_MODEL_LEN = 8192
_POOL_TOKENS = 16 * 2112
_BUFFER = 2**27  # floats


@dataclass(frozen=True)
class Case:
    """Batch of `num_sequences` sequences, with `num_rows` new tokens after `num_computed`."""

    num_sequences: int
    num_computed: int
    num_rows: int

    def batch(self) -> ModelInput:
        """Return the model input, with blocks scattered over the pool."""
        blocks = torch.randperm(_POOL_TOKENS // _BLOCK_SIZE).split(
            -(-(self.num_computed + self.num_rows) // _BLOCK_SIZE)
        )
        token_ids = list(range(100, 100 + self.num_rows))
        chunks = [
            Chunk(token_ids, self.num_computed, table.tolist())
            for table in blocks[: self.num_sequences]
        ]
        return ModelInput(chunks, _BLOCK_SIZE)

    def num_bytes(self, config: ModelConfig, weight_bytes: float, kv_bytes: int) -> float:
        """Return the bytes that a pass reads, given the bytes per weight and per KV element."""
        matrices = config.num_parameters - config.vocab_size * config.hidden_size
        kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        context = self.num_sequences * (self.num_computed + self.num_rows)
        return matrices * weight_bytes + context * kv * kv_bytes


CASES = {
    "1 row behind 128": Case(1, 128, 1),
    "8 rows behind 128": Case(1, 128, 8),
    "16 rows behind 128": Case(1, 128, 16),
    "1 row behind 2000": Case(1, 2000, 1),
    "8 rows behind 2000": Case(1, 2000, 8),
    "1 row behind 8000": Case(1, 8000, 1),
    "8 rows behind 8000": Case(1, 8000, 8),
    "16 sequences behind 128": Case(16, 128, 1),
    "16 sequences behind 2000": Case(16, 2000, 1),
    "prefill of 256": Case(1, 0, 256),
    "512 rows behind 2000": Case(1, 2000, 512),
}


@dataclass(frozen=True)
class Row:
    """Medians of one case."""

    case: str
    native_ms: float
    torch_ms: float
    floor_ms: float


@dataclass(frozen=True)
class Report:
    """JSON report. others_percent: CPU usage of other processes, in percent of one core."""

    machine: Machine
    dtype: DTypeName
    quantization: QuantizationMethod | None
    num_threads: int
    is_cpu_time: bool
    others_percent: float
    rows: tuple[Row, ...]


class Bench:
    """Model loaded with both kernels, each with its own KV pool."""

    def __init__(self, options: argparse.Namespace) -> None:
        directory = resolve(MODEL)
        self._dtype: DTypeName = options.dtype
        self._quantization: QuantizationMethod | None = options.quantization
        self._clock = time.thread_time if options.cpu_time else time.perf_counter
        self._config = ModelConfig.from_directory(directory)
        self._native = self._load(directory, "native")
        self._torch = self._load(directory, "torch")
        self._buffer = torch.ones(_BUFFER)

    @torch.inference_mode()
    def measure(self, name: str, case: Case, rounds: int) -> Row:
        """Return the medians of a case, without the first round."""
        batch = case.batch()
        ways: dict[str, Callable[[], Tensor]] = {
            "native": self._pass(self._native, batch),
            "torch": self._pass(self._torch, batch),
            "read": lambda: self._buffer.sum(),
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds + 1):
            for way, work in ways.items():
                began_at = self._clock()
                work()
                times[way].append(self._clock() - began_at)
        ms = {way: 1e3 * statistics.median(values[1:]) for way, values in times.items()}
        kv_bytes = DTYPES[self._dtype].itemsize
        weight_bytes = 1 if self._quantization else held_bytes(self._config, kv_bytes)
        num_bytes = case.num_bytes(self._config, weight_bytes, kv_bytes)
        floor_ms = ms["read"] * num_bytes / self._buffer.nbytes
        return Row(name, round(ms["native"], 2), round(ms["torch"], 2), round(floor_ms, 2))

    def _load(self, directory: Path, kernels: Kernels) -> tuple[Decoder, Tensor]:
        model = load_model(
            directory,
            self._config,
            TensorParallelGroup(),
            dtype=DTYPES[self._dtype],
            max_model_len=_MAX_MODEL_LEN,
            block_size=_BLOCK_SIZE,
            quantization=self._quantization,
            kernels=kernels,
        )
        return model, model.new_kv_cache(_POOL_TOKENS).normal_()

    def _pass(self, loaded: tuple[Decoder, Tensor], batch: ModelInput) -> Callable[[], Tensor]:
        model, cache = loaded
        return lambda: model(batch, cache)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table and one line of JSON."""
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    bench, before, rows = Bench(options), CpuUsage.now(), []
    print(f"{'':26}{'native':>10}{'torch':>10}{'floor':>10}  ms")
    for name, case in CASES.items():
        rows.append(row := bench.measure(name, case, options.rounds))
        print(f"{name:26}{row.native_ms:10.2f}{row.torch_ms:10.2f}{row.floor_ms:10.2f}")
    report = Report(
        describe_machine(),
        options.dtype,
        options.quantization,
        options.threads,
        options.cpu_time,
        CpuUsage.now().others_percent_since(before),
        tuple(rows),
    )
    write_report(report, options.output)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.forward_pass", description="Measure a forward pass on the CPU."
    )
    parser.add_argument("--dtype", choices=get_args(DTypeName), default="float32")
    parser.add_argument("--quantization", choices=("int8",), help="format that torch supports, too")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    add_cpu_time(parser)
    add_output(parser)
    options = parser.parse_args(arguments)
    require_one_thread(parser, options)
    return options


if __name__ == "__main__":
    main()
