"""Runs a service under steady load for an hour, with a toggle a minute, and looks for growth.

Prints samples as they are taken, and a JSON line: memory, threads and descriptors of all processes
after a sixth of the time and at the end, and percentiles of latency in the first and the last
twelfth. Exits with 1 where something grew or slowed down by more than the limits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil

from specdec.client import AdminClient, Client
from specdec.types.control import SpeculationChange
from specdec.types.sampling.sampling_params import SamplingParams
from tests.chaos.suite import DRAFT, idle_faults
from tests.e2e.conftest import RunningService, running_service
from tests.specdec.tiny import tiny_llama_dir

NUM_CLIENTS = 4
SAMPLE_S = 15.0
TOGGLE_S = 60.0
MAX_MEMORY_GROWTH = 0.02
MAX_LATENCY_GROWTH = 0.10
FLAGS = ["--tensor-parallel-size", "2", "--max-model-len", "512", "--speculative-config", DRAFT]


@dataclass(frozen=True)
class Sample:
    """Sums over all processes of the service. memory_bytes: their own (USS)."""

    at_s: float
    memory_bytes: int
    num_threads: int
    num_descriptors: int
    num_processes: int


@dataclass(frozen=True)
class Latency:
    """Percentiles of whole requests, in seconds."""

    p50_s: float
    p99_s: float
    num_requests: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency:
        p50, p99 = np.percentile(seconds, [50, 99])
        return cls(round(float(p50), 4), round(float(p99), 4), len(seconds))


class Load:
    """Clients that send the same requests in a loop, and record when and how long."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(index,), daemon=True)
            for index in range(NUM_CLIENTS)
        ]
        self.calls: list[tuple[float, float]] = []  # beginning and duration, in seconds
        self.answers: dict[int, set[tuple[int, ...]]] = {}
        self.errors: list[str] = []

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)

    def between(self, begin_s: float, end_s: float) -> Latency:
        return Latency.of([took for at, took in self.calls if begin_s <= at < end_s])

    def _run(self, index: int) -> None:
        params = SamplingParams(
            temperature=0.8 * (index % 2), seed=index, max_tokens=64, ignore_eos=True
        )
        answers = self.answers.setdefault(index, set())
        with Client(self._address, timeout_s=60) as client:
            while not self._stopping.is_set():
                began_at_s = time.monotonic()
                try:
                    answers.add(client.generate(f"The river {index}", params).token_ids)
                except Exception as error:  # each one is a finding
                    self.errors.append(repr(error))
                self.calls.append((began_at_s, time.monotonic() - began_at_s))


def run(seconds: float) -> dict[str, object]:
    """Return the figures, with the violations among them."""
    with tempfile.TemporaryDirectory(prefix="specdec-soak-") as directory:
        model = tiny_llama_dir(Path(directory) / "model")
        with running_service(model, Path(directory) / "log", *FLAGS) as service:
            began_at_s = time.monotonic()
            with Load(service.grpc_address) as load:
                samples = _observe(service, began_at_s, seconds)
            held = idle_faults(service.http_url)
    warm = next(each for each in samples if each.at_s >= seconds / 6)
    part_s, last = seconds / 12, samples[-1]
    early = load.between(began_at_s, began_at_s + part_s)
    late = load.between(began_at_s + seconds - part_s, began_at_s + seconds)
    return {
        "benchmark": "soak",
        "minutes": seconds / 60,
        "warm": asdict(warm),
        "last": asdict(last),
        "early": asdict(early),
        "late": asdict(late),
        "violations": held + _violations(load, warm, last, early, late),
    }


def _violations(load: Load, warm: Sample, last: Sample, early: Latency, late: Latency) -> list[str]:
    found = [f"{len(load.errors)} errors, the first: {load.errors[0]}"] if load.errors else []
    found += [
        f"client {index} had {len(answers)} different answers"
        for index, answers in load.answers.items()
        if len(answers) != 1
    ]
    growth = last.memory_bytes / warm.memory_bytes - 1
    if growth > MAX_MEMORY_GROWTH:
        found.append(f"memory grew by {growth:.1%} (limit {MAX_MEMORY_GROWTH:.0%})")
    for name in ("num_threads", "num_descriptors", "num_processes"):
        before, after = getattr(warm, name), getattr(last, name)
        if after > before * (1 + MAX_MEMORY_GROWTH):
            found.append(f"{name} grew from {before} to {after}")
    if late.p99_s > early.p99_s * (1 + MAX_LATENCY_GROWTH):
        found.append(f"p99 rose from {early.p99_s} to {late.p99_s} s")
    return found


def _observe(service: RunningService, began_at_s: float, seconds: float) -> list[Sample]:
    """Sample and toggle until the time is over."""
    samples: list[Sample] = []
    toggled_at_s, modes = began_at_s, itertools.cycle(("off", "on"))
    while time.monotonic() - began_at_s < seconds:
        time.sleep(min(SAMPLE_S, seconds / 24))
        samples.append(_sample(service, time.monotonic() - began_at_s))
        print(json.dumps(asdict(samples[-1])), file=sys.stderr, flush=True)
        if time.monotonic() - toggled_at_s >= min(TOGGLE_S, seconds / 12):
            toggled_at_s = time.monotonic()
            with AdminClient(service.grpc_address) as admin:
                admin.set_speculation(SpeculationChange(mode=next(modes)))
    return samples


def _sample(service: RunningService, at_s: float) -> Sample:
    memory = threads = descriptors = count = 0
    for process in (service.process, *service.descendants()):
        with suppress(psutil.NoSuchProcess):
            used = process.memory_full_info().uss
            memory, count = memory + used, count + 1
            threads += process.num_threads()
            descriptors += process.num_fds()
    return Sample(round(at_s, 1), memory, threads, descriptors, count)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    report = run(parser.parse_args().minutes * 60)
    print(json.dumps(report))
    return 1 if report["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
