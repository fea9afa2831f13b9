"""Measure the memory of the service's processes, and the service's start-up time.

Report the peak resident memory of each process that holds a model or serves requests, after a load
that fills most of the KV pool, compared with the weights and KV that it must hold; and the seconds
until the service is ready with the model in the cache. Ray's own processes are counted but have no
limit.

    python -m benchmarks.memory [--quantization int8] [--kv-gib 2] [--output FILE]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from tqdm import tqdm

from benchmarks.bytes_moved import kv_bytes, weight_bytes
from benchmarks.contenders import ServiceContender
from benchmarks.machine import Machine, describe_machine
from benchmarks.methods import METHODS, make_method
from benchmarks.prompts import add_prompts_option, load_prompts
from benchmarks.report_file import add_output, command_line, write_report
from benchmarks.service import ServiceProcess, started_service
from benchmarks.summary import Bar, at_most, print_bars
from benchmarks.workloads import MODEL, NO_METHOD, Workload
from specdec.config.quantization import CPU_QUANTIZATION_METHODS
from specdec.models.config.model_config import ModelConfig
from specdec.models.resolve import resolve
from specdec.text.tokenizer import Tokenizer

_QUANTIZATIONS = ("none", *CPU_QUANTIZATION_METHODS)
_MAX_TOKENS = 64
_MAX_MODEL_LEN = 2048
_MOST_RATIO, _MOST_START_S = 1.5, 25.0
_HOLDERS = ("TargetWorker", "DraftWorker.run", "Router")
"""Substrings of the names of the actors whose memory is limited."""


@dataclass(frozen=True)
class ProcessMemory:
    """Memory of one process of the service. own_bytes: unique set size at the time of reading."""

    name: str
    peak_bytes: int
    own_bytes: int


@dataclass(frozen=True)
class MemoryReport:
    """Complete results of a run.

    start_s: seconds until the service is ready, for each start; the first may have a cold cache.
    weight_bytes: of the target's matrices.
    kv_bytes: of the pool.
    """

    command: str
    machine: Machine
    model: str
    quantization: str
    method: str
    start_s: tuple[float, ...]
    weight_bytes: int
    kv_bytes: int
    processes: tuple[ProcessMemory, ...]
    bars: tuple[Bar, ...]


def process_memory(service: ServiceProcess) -> tuple[ProcessMemory, ...]:
    """Return the memory of all processes of the service, in descending order."""
    found = []
    root = psutil.Process(service.pid)
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            found.append(
                ProcessMemory(_name(process), _peak_bytes(process.pid), _own_bytes(process))
            )
    return tuple(sorted(found, key=lambda each: -each.peak_bytes))


def parse_peak(status: str) -> int:
    """Return the bytes of the VmHWM line in /proc/<pid>/status."""
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def _peak_bytes(pid: int) -> int:
    return parse_peak(Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))


def _own_bytes(process: psutil.Process) -> int:
    own: int = process.memory_full_info().uss
    return own


def _name(process: psutil.Process) -> str:
    """Return the name of a process; Ray puts an actor's class into its command line."""
    command = process.cmdline()
    return command[0] if command and command[0].startswith("ray::") else process.name()


def bars(
    processes: Sequence[ProcessMemory], held_bytes: int, start_s: Sequence[float]
) -> tuple[Bar, ...]:
    """Check the peak of workers and Router over weights and KV, and the fastest start."""
    holders = [each for each in processes if any(name in each.name for name in _HOLDERS)]
    peak = sum(each.peak_bytes for each in holders)
    return (
        at_most("peak of workers and Router over weights and KV", peak / held_bytes, _MOST_RATIO),
        at_most("start-up on a warm cache, s", min(start_s), _MOST_START_S),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return 0 whether or not the aims are met: machines differ."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser().parse_args(given)
    report = measure(options, command_line("benchmarks.memory", given))
    for each in report.processes:
        peak, own = each.peak_bytes / 2**20, each.own_bytes / 2**20
        print(f"{each.name:48} peak {peak:7.0f} MiB, own {own:.0f}")
    held = f"weights {report.weight_bytes / 2**20:.0f} MiB, KV {report.kv_bytes / 2**20:.0f} MiB"
    print(f"{held}; starts {', '.join(f'{each:.1f}' for each in report.start_s)} s")
    print_bars(report.bars)
    write_report(report, options.output)
    return 0


def measure(options: argparse.Namespace, command: str) -> MemoryReport:
    """Start the service `options.starts` times, and measure the last one after a load."""
    directory, kv = resolve(MODEL), int(options.kv_gib * 2**30)
    start_s = []
    for number in tqdm(range(options.starts), "starting", leave=False):
        started_at = time.monotonic()
        with started_service(
            MODEL,
            quantization=options.quantization,
            speculative_config=make_method(options.method).config,
            kv_cache_memory_gib=options.kv_gib,
            max_model_len=_MAX_MODEL_LEN,
        ) as service:
            start_s.append(time.monotonic() - started_at)
            if number == options.starts - 1:
                _run_load(service, directory, options.prompts, kv)
                processes = process_memory(service)
    config = ModelConfig.from_directory(directory)
    precision = "fp32" if options.quantization == "none" else options.quantization
    weights = weight_bytes(config, precision)
    return MemoryReport(
        command=command,
        machine=describe_machine(),
        model=MODEL,
        quantization=options.quantization,
        method=options.method,
        start_s=tuple(start_s),
        weight_bytes=weights,
        kv_bytes=kv,
        processes=processes,
        bars=bars(processes, weights + kv, start_s),
    )


def _run_load(service: ServiceProcess, directory: Path, prompts: Path, pool_bytes: int) -> None:
    """Send all prompts, concatenated to fill the KV pool."""
    token_ids = [each.token_ids for each in load_prompts(prompts, Tokenizer(directory))]
    joined = tuple(token for each in token_ids for token in each)
    config = ModelConfig.from_directory(directory)
    num_streams = pool_bytes // kv_bytes(config, "fp32", _MAX_MODEL_LEN)
    length = _MAX_MODEL_LEN - _MAX_TOKENS
    # Each prompt starts at another offset, because common prefixes would share their KV.
    repeated = joined * (2 + length // len(joined))
    long_prompts = tuple(repeated[16 * index :][:length] for index in range(num_streams))
    ServiceContender(service.address).measure(Workload(long_prompts, _MAX_TOKENS, NO_METHOD))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.memory", description="Measure the service's memory and its start-up."
    )
    parser.add_argument("--quantization", choices=_QUANTIZATIONS, default="none")
    parser.add_argument("--method", choices=METHODS, default="ngram")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument(
        "--kv-gib", type=float, default=2.0, help="size of the KV pool (default: 2, as a service)"
    )
    add_prompts_option(parser)
    add_output(parser, "memory")
    return parser


if __name__ == "__main__":
    sys.exit(main())
