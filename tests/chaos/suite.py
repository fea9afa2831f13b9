"""The chaos suite: traffic and faults on real services."""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from cluster.control.plane import SILENCE_LIMIT_S
from specdec.client import Client, ClientError
from specdec.types.sampling_params import SamplingParams
from tests.chaos.faults import Fault, Site, Victim, all_faults
from tests.chaos.history import violations
from tests.chaos.nodes import two_nodes
from tests.chaos.traffic import BROKEN, REFUSALS, Outcome, ProcessTree, Traffic, processes
from tests.e2e.conftest import running_service

NUM_CLIENTS = 6
MIN_PAUSE_S, MAX_PAUSE_S = 2.0, 8.0
RECOVERY_LIMIT_S = 180.0
IDLE_LIMIT_S = SILENCE_LIMIT_S + 10
"""The metrics of a killed replica are dropped after SILENCE_LIMIT_S."""
SMALL_DISK_BYTES = 4 << 20
DRAFT = '{"method": "draft_model", "num_speculative_tokens": 3, "policy": "threshold"}'
LOOKUP = '{"method": "ngram", "num_speculative_tokens": 3, "policy": "threshold"}'
_COMMON = ["--ingress", "serve", "--tensor-parallel-size", "2", "--max-model-len", "512"]
_COMMON += ["--max-queue-len", "16", "--speculative-config"]
SERVICES = {
    "draft": [*_COMMON, DRAFT],
    "replicas": [*_COMMON, LOOKUP, "--num-replicas", "2"],
}
"""Flags by service: a target with a draft model, and two replicas that look drafts up. Both have
two ranks a replica; together they would not fit on two cores."""
NODES = "nodes"
"""The service on two Ray nodes, which needs root; `missing` of `tests.e2e.two_nodes`."""
_PROBE = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


@dataclass(frozen=True)
class Injected:
    """A fault that was put in. recovered_s: seconds until the service was whole again."""

    name: str
    detail: str
    at_s: float
    recovered_s: float


@dataclass
class Report:
    """What happened, and what was wrong."""

    service: str
    seed: int
    injected: list[Injected] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def table(self) -> list[str]:
        """Return a line for each kind of fault, in Markdown."""
        lines = ["| fault | times | recovery, median s | longest s |", "|---|---|---|---|"]
        for name in sorted({each.name for each in self.injected}):
            times = [each.recovered_s for each in self.injected if each.name == name]
            median = statistics.median(times)
            lines.append(f"| {name} | {len(times)} | {median:.1f} | {max(times):.1f} |")
        return lines

    def summary(self) -> dict[str, object]:
        """Return the figures as JSON."""
        ends = Counter(each.call.ends[0].status for each in self.outcomes if each.call.ends)
        return {
            "benchmark": "chaos",
            "service": self.service,
            "seed": self.seed,
            "num_faults": len(self.injected),
            "num_calls": len(self.outcomes),
            "ends": dict(ends),
            "num_violations": len(self.violations),
        }


def run(
    name: str, model: Path, directory: Path, seconds: float, seed: int, only: Sequence[str] = ()
) -> Report:
    """Start one of SERVICES, or NODES, and put faults into it for this long."""
    generator, report = random.Random(f"{name} {seed}"), Report(name, seed)
    directory = directory / name
    directory.mkdir()
    with _running(name, model, directory) as service:
        faults = [
            each
            for each in service.faults
            if (not only or each.name in only) and each.applies(service.root)
        ]
        traffic = Traffic(service.grpc_address, service.http_url, seed)
        traffic.learn()
        site = Site(service.root, traffic, directory / "state", NUM_CLIENTS)
        expected = _population(service.root)
        traffic.start(NUM_CLIENTS)
        ends_at_s = time.monotonic() + seconds
        while time.monotonic() < ends_at_s:
            time.sleep(generator.uniform(MIN_PAUSE_S, MAX_PAUSE_S))
            fault = generator.choice(faults)
            report.injected.append(_inject(fault, site, service, expected, generator))
            _log(report.injected[-1])
            if report.injected[-1].recovered_s >= RECOVERY_LIMIT_S:
                report.violations.append(f"no recovery from {report.injected[-1]}")
                break
        traffic.stop()
        report.violations += traffic.overdue + _population_faults(service, expected)
        report.violations += idle_faults(service.http_url)
    report.outcomes = list(traffic.outcomes)
    calls = [each.call for each in report.outcomes]
    report.violations += violations(calls, REFUSALS | {BROKEN})
    return report


@contextmanager
def _running(name: str, model: Path, directory: Path) -> Iterator[Victim]:
    if name == NODES:
        with two_nodes(model, directory / "log") as service:
            yield service
        return
    with (
        _small_disk(directory / "state") as has_small_disk,
        running_service(model, directory / "log", *SERVICES[name]) as service,
    ):
        faults = all_faults(has_small_disk=has_small_disk)
        yield Victim(service.process, service.grpc_address, service.http_url, faults)


def _inject(
    fault: Fault,
    site: Site,
    service: Victim,
    expected: Counter[str],
    generator: random.Random,
) -> Injected:
    at_s = time.monotonic()
    detail = fault.inject(site, generator)
    ended_at_s = time.monotonic()
    while time.monotonic() - ended_at_s < RECOVERY_LIMIT_S:
        if _is_whole(service, expected):
            break
        time.sleep(0.2)
    return Injected(fault.name, detail, at_s, time.monotonic() - ended_at_s)


_ACTORS = ("DraftWorker", "TargetWorker", ":Router", "ControlPlane", "ServeController")


def _population(root: ProcessTree) -> Counter[str]:
    """Return how many processes each actor has."""
    return Counter({name: len(processes(root, name)) for name in _ACTORS})


def _is_whole(service: Victim, expected: Counter[str]) -> bool:
    """Return whether all actors live, and both interfaces answer."""
    if _population(service.root) != expected:
        return False
    try:
        if httpx.get(service.http_url + "/ready", timeout=5).status_code != 200:
            return False
        with Client(service.grpc_address, timeout_s=10) as client:
            client.generate("The river", _PROBE)
    except (httpx.HTTPError, ClientError):
        return False
    return True


def _population_faults(service: Victim, expected: Counter[str]) -> list[str]:
    population = _population(service.root)
    if population == expected:
        return []
    return [f"processes are {dict(population)}, not {dict(expected)}"]


def idle_faults(http_url: str) -> list[str]:
    """Return what a service without requests still holds after IDLE_LIMIT_S."""
    ends_at_s = time.monotonic() + IDLE_LIMIT_S
    while True:
        faults = _held(http_url)
        if not faults or time.monotonic() > ends_at_s:
            return faults
        time.sleep(1)


def _held(http_url: str) -> list[str]:
    try:
        metrics = httpx.get(http_url + "/metrics", timeout=10).text
    except httpx.HTTPError as error:
        return [f"/metrics: {error!r}"]
    values = {
        name: [
            float(line.rsplit(" ", 1)[1])
            for line in metrics.splitlines()
            if f"{name}{{" in line and not line.startswith("#")
        ]
        for name in ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
    }
    return [
        f"{name} of the idle service is {found}"
        for name, found in values.items()
        if not found or any(found)
    ]


@contextmanager
def _small_disk(path: Path) -> Iterator[bool]:
    """Mount a small file system for the state of the service, where that is allowed."""
    path.mkdir()
    size = f"size={SMALL_DISK_BYTES}"
    command = ["mount", "-t", "tmpfs", "-o", size, "specdec-chaos", str(path)]
    is_mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(path)], check=True)


def _log(injected: Injected) -> None:
    text = f"{injected.name} ({injected.detail}): whole after {injected.recovered_s:.1f} s"
    print(text, file=sys.stderr, flush=True)
