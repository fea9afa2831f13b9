"""Fixtures that run the real service with the real command, on a tiny model.

Each service runs until the last test of this folder: Ray's idle processes take time from others.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom

import psutil
import pytest

from tests.chaos.traffic import processes

START_TIMEOUT_S = 300.0
# Speculation on at every load, since goodput would turn it off for a tiny model.
ALWAYS_DRAFT = [
    "--speculative-config",
    '{"method": "ngram", "policy": "threshold", "speculation_threshold": 256}',
]
STOP_TIMEOUT_S = 45.0
PORTS = 20_000, 32_000

chance = SystemRandom()  # tests seed the other generator, in several processes


@dataclass(frozen=True)
class RunningService:
    process: psutil.Process
    grpc_address: str
    http_url: str
    log: Path

    @property
    def ports(self) -> set[int]:
        return {int(url.rpartition(":")[2]) for url in (self.grpc_address, self.http_url)}

    def listening(self) -> set[tuple[str, int]]:
        """Return the addresses with these ports on which any process of the service listens."""
        return {
            (connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port)  # IPv4 over IPv6
            for process in self.descendants()
            for connection in process.net_connections("tcp")
            if connection.status == "LISTEN" and connection.laddr.port in self.ports
        }

    def descendants(self) -> list[psutil.Process]:
        return self.process.children(recursive=True)

    def processes(self, name: str) -> list[psutil.Process]:
        """Return the living processes of the actors with this name."""
        return processes(self.process, name)


def free_ports(count: int) -> list[int]:
    """Return ports that no other worker of this run chooses.

    Linux gives outgoing connections none of them, unless `ip_local_port_range` begins below 32,000.
    """
    ports: list[int] = []
    size = (PORTS[1] - PORTS[0]) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    first = PORTS[0] + size * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    with ExitStack() as stack:
        while len(ports) < count:
            taken = stack.enter_context(closing(socket.socket()))
            port = first + chance.randrange(size)
            with suppress(OSError):
                taken.bind(("127.0.0.1", port))
                ports.append(port)
    return ports


@contextmanager
def running_service(directory: Path | None, log: Path, *flags: str) -> Iterator[RunningService]:
    """Run `specdec serve`, and stop it with SIGINT; assert that no process is left.

    directory: of the model, or None if `flags` name it.
    """
    grpc_port, http_port = free_ports(2)
    ports = ["--grpc-port", str(grpc_port), "--http-port", str(http_port)]
    state = ["--state-dir", str(log.parent / "state")]
    command = [sys.executable, "-m", "cluster", "serve"]
    command += [] if directory is None else ["--model", str(directory)]
    with log.open("wb") as output:
        popen = subprocess.Popen([*command, *ports, *state, *flags], stderr=output, stdout=output)
    service = RunningService(
        psutil.Process(popen.pid), f"127.0.0.1:{grpc_port}", f"http://127.0.0.1:{http_port}", log
    )
    try:
        _wait_until_ready(popen, log)
        yield service
    finally:
        _stop(popen, service)


def _wait_until_ready(popen: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not re.search("(is|are) ready after", log.read_text()):
        assert popen.poll() is None, f"the service ended: {log.read_text()}"
        assert time.monotonic() < deadline, f"the service did not start: {log.read_text()}"
        time.sleep(0.2)


def _stop(popen: subprocess.Popen[bytes], service: RunningService) -> None:
    started = service.descendants() if popen.poll() is None else []
    popen.send_signal(signal.SIGINT)
    try:
        exit_code = popen.wait(STOP_TIMEOUT_S)
        _, left_over = psutil.wait_procs(started, timeout=10)
        assert left_over == [], "processes are left after SIGINT"
        assert exit_code == 0, service.log.read_text()
    finally:
        for process in [*started, service.process]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.fixture(scope="package")
def embedded(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory):
    """The embedded ingress, two ranks."""
    log = tmp_path_factory.mktemp("embedded") / "log"
    flags = ["--tensor-parallel-size", "2", "--max-model-len", "512", "--max-queue-len", "40"]
    flags += ALWAYS_DRAFT
    with running_service(tiny_model_dir, log, *flags) as service:
        yield service


@pytest.fixture(scope="package")
def on_serve(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory):
    """Ray Serve's ingress, one rank, step messages over TCP."""
    log = tmp_path_factory.mktemp("on_serve") / "log"
    flags = ["--ingress", "serve", "--transport", "tcp", "--max-model-len", "512"]
    flags += ALWAYS_DRAFT
    with running_service(tiny_model_dir, log, *flags) as service:
        yield service


@pytest.fixture(scope="package", params=["embedded", "on_serve"])
def service(request: pytest.FixtureRequest) -> RunningService:
    """Both services, for tests that apply to both ingresses."""
    running: RunningService = request.getfixturevalue(request.param)
    return running


@pytest.fixture(scope="package")
def smollm2(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory):
    """SmolLM2, a trained model, with the default speculation. For slow tests."""
    log = tmp_path_factory.mktemp("smollm2") / "log"
    flags = ["--served-model-name", "smollm2", "--max-model-len", "2048"]
    with running_service(smollm2_dir, log, *flags, "--max-queue-len", "40") as service:
        yield service
