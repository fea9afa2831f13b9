"""Measure the CPU time of the whole service by thread, and how much its device idles.

The service as users run it (Router with HTTP and gRPC, engine thread, Ray, a rank in its own
process), with a target that computes nothing: `instant` takes no time, `clocked` the time of an
H100 with a model of 8B parameters. Loads are API:STREAMS: `sse` and `http-whole` are
/v1/completions, `grpc` and `grpc-whole` GenerateStream and Generate. Each API also runs requests of
one token, for the cost of a request. The last line printed is JSON.

    python -m benchmarks.service_cpu [--loads sse:64 ...] [--target clocked] [--quick]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

from benchmarks.machine import Machine, describe_machine
from benchmarks.report_file import add_output, parse_options, write_report, write_text
from benchmarks.service import ServiceProcess, started_service
from benchmarks.service_cpu.cpu import REFERENCE_LOOP_US, ServiceThreads, loop_us
from benchmarks.service_cpu.device import (
    INSTANT,
    LINE_FILE,
    DeviceSpeed,
    DeviceUse,
    read_speed,
    read_steps,
    write_clocked_model,
)
from benchmarks.service_cpu.engine import InProcess
from benchmarks.service_cpu.load import MODEL_NAME, Api, Load, LoadGenerator
from benchmarks.service_cpu.page import page, print_row
from benchmarks.service_cpu.replica import install
from benchmarks.service_cpu.results import Latencies, Repetition, Row, make_row
from benchmarks.workloads import MODEL
from specdec.models.resolve import resolve

STREAMS = (1, 16, 64, 256)
TARGETS = {"instant": INSTANT, "clocked": DeviceSpeed()}
MAX_TOKENS = 128
SETTINGS: dict[str, Any] = {  # those of a GPU, since the service would use those of a CPU
    "device": "cpu",
    "dtype": "bfloat16",
    "max_model_len": 2048,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
    "max_prefill_tokens": 2048,
    "kv_cache_memory_gib": 2.0,
    "speculative_config": None,
    "log_level": "warning",
}
_MIN_REQUESTS, _ONE_TOKEN_REQUESTS, _ONE_TOKEN_STREAMS = 4, 512, 16
_NUM_LOOPS = 5


@dataclass(frozen=True)
class Report:
    """Complete results of a run."""

    command: str
    machine: Machine
    repeats: int
    reference_loop_us: float
    speeds: dict[str, DeviceSpeed]
    rows: tuple[Row, ...]


class MeasuredService:
    """A running service, its load generator and its threads."""

    def __init__(self, service: ServiceProcess, directory: Path) -> None:
        self._directory, self._num_requests = directory, 0
        self._threads = ServiceThreads.of(service.pid, directory)
        self._loads = LoadGenerator(service.address, service.http_url)
        self.close = self._loads.close

    def measure(self, load: Load, seed: int) -> Repetition:
        """Run a load. seed: of its prompts."""
        self._num_requests += load.num_requests
        streams = load.streams if read_speed(self._directory) == INSTANT else 0
        (self._directory / LINE_FILE).write_text(json.dumps((streams, self._num_requests)))
        loop_before_us = _median_loop_us()
        running = self._loads.begin(load, seed)
        time.sleep(running.starts_at_s - time.perf_counter())
        before = self._threads.times()
        times = running.wait()
        used_us = self._threads.used_us(before, self._threads.times())
        began_s, ended_s = running.starts_at_s, max(each.last_at_s for each in times)
        return Repetition(
            load.num_tokens / (ended_s - began_s),
            (loop_before_us + _median_loop_us()) / 2,
            used_us,
            Latencies.of(times, load),
            DeviceUse.of(read_steps(self._directory, began_s, ended_s)),
        )


def _median_loop_us() -> float:
    return statistics.median(loop_us() for _ in range(_NUM_LOOPS))


def measure_target(
    target: str, speed: DeviceSpeed, loads: Sequence[Load], repeats: int, frontends: int
) -> list[Row]:
    """Measure the loads on one target; repetitions of a load are apart, beside the engine's."""
    with TemporaryDirectory(prefix="specdec-service-cpu-") as name:
        directory = write_clocked_model(Path(name) / "model", resolve(MODEL), speed)
        with started_service(
            str(directory), install, served_model_name=MODEL_NAME, frontends=frontends, **SETTINGS
        ) as service:
            measured = MeasuredService(service, directory)
            try:
                return _measure_loads(measured, directory, target, loads, repeats)
            finally:
                measured.close()


def _measure_loads(
    service: MeasuredService, directory: Path, target: str, loads: Sequence[Load], repeats: int
) -> list[Row]:
    engine = InProcess(directory, SETTINGS) if target == "clocked" else None
    found: dict[Load, list[Repetition]] = {load: [] for load in loads}
    rates: dict[Load, list[float]] = {load: [] for load in loads}
    for api in {load.api for load in loads}:
        service.measure(Load(api, 4, 16, 16), -1)  # warms up
    for repeat, load in product(range(repeats), loads):
        found[load].append(service.measure(load, repeat))
        if engine is not None:
            rates[load].append(engine.tokens_per_s(load, repeat))
        print_row(make_row(target, load, found[load], rates[load]))
    return [make_row(target, load, found[load], rates[load]) for load in loads]


def make_loads(chosen: Sequence[tuple[Api, int]], rounds: int) -> list[Load]:
    """Return the loads, then those of one token of the same APIs. rounds: requests a stream."""
    loads = [
        Load(api, streams, max(_MIN_REQUESTS, rounds * streams), MAX_TOKENS)
        for api, streams in chosen
    ]
    apis = dict.fromkeys(api for api, _ in chosen)
    return loads + [Load(api, _ONE_TOKEN_STREAMS, _ONE_TOKEN_REQUESTS, 1) for api in apis]


def _chosen_load(text: str) -> tuple[Api, int]:
    api, _, streams = text.partition(":")
    if api not in get_args(Api) or not streams.isdecimal() or int(streams) < 1:
        raise ValueError(text)
    return api, int(streams)  # type: ignore[return-value]


_chosen_load.__name__ = "load (API:STREAMS)"  # of argparse's message


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.service_cpu", description=__doc__)
    everything = list(product(get_args(Api), STREAMS))
    parser.add_argument("--loads", type=_chosen_load, nargs="+", default=everything)
    parser.add_argument("--target", choices=TARGETS, nargs="+", default=list(TARGETS))
    parser.add_argument("--frontends", type=int, default=0, help="processes (default: 0)")
    parser.add_argument("--repeats", type=int, default=3, help="of each load (default: 3)")
    parser.add_argument("--quick", action="store_true", help="one repetition, half of the requests")
    add_output(parser, "service-cpu")
    return parse_options(parser, arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the report and its page."""
    options = _options(arguments)
    repeats, rounds = (1, 1) if options.quick else (options.repeats, 2)
    loads = make_loads(options.loads, rounds)
    rows = [
        row
        for target in options.target
        for row in measure_target(target, TARGETS[target], loads, repeats, options.frontends)
    ]
    report = Report(
        options.command, describe_machine(), repeats, REFERENCE_LOOP_US, TARGETS, tuple(rows)
    )
    write_report(report, options.output)
    if options.output is not None:
        write_text(options.output.with_suffix(".md"), page(options.command, repeats, rows))


if __name__ == "__main__":
    main()
