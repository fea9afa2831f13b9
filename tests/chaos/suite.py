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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from cluster.control.plane import SILENCE_LIMIT_S
from specdec.client import Client, ClientError
from specdec.types.sampling.sampling_params import SamplingParams
from tests.chaos.faults import (
    DRAFT_WORKER,
    FRONT_END,
    SPARE_WORKER,
    Fault,
    Kill,
    Site,
    Victim,
    all_faults,
)
from tests.chaos.history import violations
from tests.chaos.nodes import two_nodes
from tests.chaos.traffic import BROKEN, REFUSALS, Outcome, ProcessTree, Traffic, processes
from tests.e2e.conftest import running_service
from tests.specdec.tiny import disturbed_llama_dir

NUM_CLIENTS = 6
MIN_PAUSE_S, MAX_PAUSE_S = 2.0, 8.0
RECOVERY_LIMIT_S = 180.0
SPARE_LIMIT_S = 60.0
_DRAFTS_AND_SPARES = "DraftWorker"
IDLE_LIMIT_S = SILENCE_LIMIT_S + 10
"""The metrics of a killed replica are dropped after SILENCE_LIMIT_S."""
SMALL_DISK_BYTES = 4 << 20
DRAFT = '{"method": "draft_model", "num_speculative_tokens": 3, "policy": "threshold"}'
LOOKUP = '{"method": "ngram", "num_speculative_tokens": 3, "policy": "threshold"}'
COLOCATED = (
    '{"method": "colocated_draft_model", "model": "DRAFT_DIR", "num_speculative_tokens": 3,'
    ' "policy": "threshold"}'
)
"""DRAFT_DIR is replaced by a model whose drafts are accepted in part."""
_COMMON = ["--tensor-parallel-size", "2", "--max-model-len", "512", "--max-queue-len", "16"]
SERVICES = {
    "draft": [*_COMMON, "--ingress", "serve", "--speculative-config", DRAFT],
    "colocated": [*_COMMON, "--ingress", "serve", "--speculative-config", COLOCATED],
    "replicas": [
        *_COMMON, "--ingress", "serve", "--speculative-config", LOOKUP, "--num-replicas", "2",
    ],
    "frontends": [*_COMMON, "--frontends", "2", "--speculative-config", LOOKUP],
}  # fmt: skip
"""Flags by service: a target with a draft model, on a worker or colocated, two replicas that look
drafts up, and one replica with front ends. All have two ranks a replica; together they would not
fit on two cores."""
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
        expected = _population(service.root)
        report.violations += _population_faults(service.root, expected)  # waits for spares
        faults = [
            each
            for each in service.faults
            if (not only or each.name in only) and each.applies(service.root)
        ]
        traffic = Traffic(service.grpc_address, service.http_url, seed)
        traffic.learn()
        site = Site(service.root, traffic, directory / "state", NUM_CLIENTS)
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
        report.violations += traffic.overdue + _population_faults(service.root, expected)
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
    (directory / "draft").mkdir()
    draft = str(disturbed_llama_dir(model, directory / "draft"))
    flags = [each.replace("DRAFT_DIR", draft) for each in SERVICES[name]]
    with (
        _small_disk(directory / "state") as has_small_disk,
        running_service(model, directory / "log", *flags) as service,
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
    restarts = _draft_restarts(service)
    at_s = time.monotonic()
    detail = fault.inject(site, generator)
    ended_at_s = time.monotonic()
    loses_draft = fault == Kill(DRAFT_WORKER) and detail.startswith("pid")
    while time.monotonic() - ended_at_s < RECOVERY_LIMIT_S:
        if _is_whole(service, expected) and (not loses_draft or _has_draft(service, restarts)):
            break
        time.sleep(0.1)
    return Injected(fault.name, detail, at_s, time.monotonic() - ended_at_s)


def _has_draft(service: Victim, before: dict[str, float]) -> bool:
    """Return whether a draft model was restarted. Its Router reports it within a second."""
    now = _draft_restarts(service)
    return any(number > before.get(labels, 0.0) for labels, number in now.items())


def _draft_restarts(service: Victim) -> dict[str, float]:
    """Return the restarts of draft models; each counts once the model is warm."""
    with suppress(httpx.HTTPError):
        return _series(service.http_url, "draft_worker_restarts_total")
    return {}


_ACTORS = (DRAFT_WORKER, "TargetWorker", ":Router", FRONT_END, "ControlPlane", "ServeController")


def _population(root: ProcessTree) -> Counter[str]:
    """Return how many processes each actor has, without spares, which serve nothing."""
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


def _population_faults(root: ProcessTree, expected: Counter[str]) -> list[str]:
    """Return what is missing or left over, once each draft worker could have a spare again."""
    num_drafts = expected[DRAFT_WORKER]
    expected = expected | Counter({SPARE_WORKER: num_drafts, _DRAFTS_AND_SPARES: 2 * num_drafts})
    ends_at_s = time.monotonic() + SPARE_LIMIT_S
    while True:
        population = Counter({name: len(processes(root, name)) for name in expected})
        if population == expected:
            return []
        if time.monotonic() > ends_at_s:
            return [f"processes are {dict(population)}, not {dict(expected)}"]
        time.sleep(1)


def idle_faults(http_url: str) -> list[str]:
    """Return what a service without requests still holds after IDLE_LIMIT_S."""
    ends_at_s = time.monotonic() + IDLE_LIMIT_S
    while True:
        faults = _held(http_url)
        if not faults or time.monotonic() > ends_at_s:
            return faults
        time.sleep(1)


def _held(http_url: str) -> list[str]:
    names = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
    try:
        values = {name: list(_series(http_url, name).values()) for name in names}
    except httpx.HTTPError as error:
        return [f"/metrics: {error!r}"]
    return [
        f"{name} of the idle service is {found}"
        for name, found in values.items()
        if not found or any(found)
    ]


def _series(http_url: str, name: str) -> dict[str, float]:
    """Return the values of a metric by labels."""
    lines = httpx.get(http_url + "/metrics", timeout=10).text.splitlines()
    found = (line.rsplit(" ", 1) for line in lines if f"{name}{{" in line and line[0] != "#")
    return {labels: float(value) for labels, value in found}


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
