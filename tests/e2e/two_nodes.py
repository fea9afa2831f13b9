"""Runs two Ray nodes in two network namespaces of this machine, with a link that can fail."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

HEAD, WORKER = "10.77.0.1", "10.77.0.2"
PORT = 6399
INTERFACE = "sd0"
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
OBJECT_STORE_BYTES = 100_000_000


def missing() -> str:
    """Return why namespaces are not supported here, or an empty string."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    tools = [tool for tool in ("ip", "iptables") if shutil.which(tool) is None]
    if tools:
        return f"no {' and no '.join(tools)} on the path"
    probe = f"specdec-{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return made.stderr.strip()


@dataclass(frozen=True)
class Cluster:
    """Both nodes; head and worker are the names of their namespaces."""

    head: str
    worker: str
    environment: dict[str, str]
    directory: Path

    def command(self, namespace: str, *arguments: str) -> list[str]:
        return ["ip", "netns", "exec", namespace, *arguments]

    def run(self, namespace: str, *arguments: str) -> None:
        subprocess.run(self.command(namespace, *arguments), check=True, capture_output=True)

    def lose_packets(self, share: float) -> None:
        """Drop this fraction of packets in both directions; 1 takes the link down."""
        for namespace in (self.head, self.worker):
            rule = ["-i", INTERFACE, "-m", "statistic", "--mode", "random"]
            rule += ["--probability", str(share), "-j", "DROP"]
            self.run(namespace, "iptables", "-A", "INPUT", *rule)

    def lose_none(self) -> None:
        for namespace in (self.head, self.worker):
            self.run(namespace, "iptables", "-F", "INPUT")

    def processes_on(self, namespace: str) -> list[psutil.Process]:
        pids = subprocess.run(
            ["ip", "netns", "pids", namespace], check=True, capture_output=True, text=True
        )
        return [
            psutil.Process(int(pid)) for pid in pids.stdout.split() if psutil.pid_exists(int(pid))
        ]


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Run a head with the label role=target, and a worker with role=draft."""
    tag = secrets.token_hex(3)
    directory = Path(tempfile.mkdtemp(prefix="sd-"))  # Ray's sockets need a short path
    made = Cluster(f"specdec-h-{tag}", f"specdec-w-{tag}", _environment(), directory)
    try:
        _connect(made)
        head = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        head += ["--temp-dir", str(made.directory)]
        _start(made, made.head, *head, "--labels=role=target", ip=HEAD)
        _start(made, made.worker, f"--address={HEAD}:{PORT}", "--labels=role=draft", ip=WORKER)
        yield made
    finally:
        _end(made)
        shutil.rmtree(directory, ignore_errors=True)


def _environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return inherited | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(Path.cwd()),
    }


def _connect(made: Cluster) -> None:
    for namespace in (made.head, made.worker):
        subprocess.run(["ip", "netns", "add", namespace], check=True)
        made.run(namespace, "ip", "link", "set", "lo", "up")
    peer = ["peer", "name", INTERFACE, "netns", made.worker]
    made.run(made.head, "ip", "link", "add", INTERFACE, "type", "veth", *peer)
    for namespace, address in ((made.head, HEAD), (made.worker, WORKER)):
        made.run(namespace, "ip", "addr", "add", f"{address}/24", "dev", INTERFACE)
        made.run(namespace, "ip", "link", "set", INTERFACE, "up")
    for namespace, other in ((made.head, WORKER), (made.worker, HEAD)):
        # As in every pod: Ray determines the address of a node from its default route.
        made.run(namespace, "ip", "route", "add", "default", "via", other)


def _start(made: Cluster, namespace: str, *flags: str, ip: str) -> None:
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={ip}"]
    command += ["--num-cpus=2", "--disable-usage-stats"]
    command += [f"--object-store-memory={OBJECT_STORE_BYTES}"]
    started = subprocess.run(
        made.command(namespace, *command, *flags),
        env=made.environment,
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
    )
    assert started.returncode == 0, started.stdout + started.stderr


def _end(made: Cluster) -> None:
    """Kill the processes in each namespace; `ray stop` would stop every Ray of the machine."""
    for namespace in (made.worker, made.head):
        with suppress(subprocess.CalledProcessError):
            processes = made.processes_on(namespace)
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(processes, timeout=10)
        subprocess.run(["ip", "netns", "del", namespace], capture_output=True)


@dataclass(frozen=True)
class JoinedService:
    """`specdec serve --ray-address` in the head's namespace."""

    cluster: Cluster
    popen: subprocess.Popen[bytes]
    log: Path

    def ask(self, *arguments: str, timeout_s: float = 120.0) -> subprocess.Popen[str]:
        """Start a client in the namespace of the head, which is not reachable from here."""
        command = [sys.executable, "-m", "tests.e2e.stream_client", *arguments]
        return subprocess.Popen(
            self.cluster.command(self.cluster.head, *command),
            env=self.cluster.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def named(self, namespace: str, name: str) -> list[psutil.Process]:
        """Return the processes of the actors with this name on a node."""
        found = []
        for process in self.cluster.processes_on(namespace):
            with suppress(psutil.Error):
                if name in " ".join(process.cmdline()):
                    found.append(process)
        return found


def serving(made: Cluster, log: Path, *flags: str) -> subprocess.Popen[bytes]:
    """`specdec serve --ray-address` in the head's namespace."""
    command = [sys.executable, "-m", "cluster", "serve", "--ray-address", f"{HEAD}:{PORT}"]
    command += ["--ingress", "serve", "--state-dir", str(log.parent / "state")]
    with log.open("wb") as output:
        return subprocess.Popen(
            made.command(made.head, *command, *flags),
            env=made.environment,
            stdout=output,
            stderr=output,
        )


@contextmanager
def joined_service(made: Cluster, log: Path, *flags: str) -> Iterator[JoinedService]:
    popen = serving(made, log, *flags)
    try:
        _wait_until_ready(popen, log)
        yield JoinedService(made, popen, log)
    finally:
        popen.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            popen.wait(STOP_TIMEOUT_S)
        popen.kill()


def _wait_until_ready(popen: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while "is ready" not in log.read_text():
        assert popen.poll() is None, f"the service ended: {log.read_text()}"
        assert time.monotonic() < deadline, f"the service did not start: {log.read_text()}"
        time.sleep(0.2)
