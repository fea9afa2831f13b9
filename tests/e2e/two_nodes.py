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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.e2e.link import Condition, Link, link

HEAD, WORKER = "10.77.0.1", "10.77.0.2"
OUTSIDE, HEAD_OUTSIDE = "10.78.0.1", "10.78.0.2"
"""Addresses of a second link, between this namespace and the head, for clients."""
PORT = 6399
INTERFACE = "sd0"
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
OBJECT_STORE_BYTES = 100_000_000


def missing() -> str:
    """Return why namespaces are not supported here, or an empty string."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "no ip on the path"
    if not Path("/dev/net/tun").exists():
        return "no /dev/net/tun"
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
    link: Link

    def command(self, namespace: str, *arguments: str) -> list[str]:
        return ["ip", "netns", "exec", namespace, *arguments]

    def run(self, namespace: str, *arguments: str) -> None:
        subprocess.run(self.command(namespace, *arguments), check=True, capture_output=True)

    def lose_packets(self, share: float) -> None:
        """Drop this fraction of packets in both directions; 1 takes the link down."""
        self.link.set(Condition(loss=share))

    def lose_none(self) -> None:
        self.link.set(Condition())

    def children(self, recursive: bool = True) -> list[psutil.Process]:
        """Return the processes on both nodes, as `psutil.Process.children` does."""
        return [*self.processes_on(self.head), *self.processes_on(self.worker)]

    def end_worker(self) -> None:
        """Kill every process on the second node."""
        _kill(self.processes_on(self.worker))

    def start_worker(self) -> None:
        """Start Ray on the second node."""
        _start(self, self.worker, f"--address={HEAD}:{PORT}", "--labels=role=draft", ip=WORKER)

    def processes_on(self, namespace: str) -> list[psutil.Process]:
        return processes_in(namespace)


def processes_in(namespace: str) -> list[psutil.Process]:
    """Return the living processes in a network namespace."""
    command = ["ip", "netns", "pids", namespace]
    pids = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(int(pid)))
    return found


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)


@contextmanager
def cluster(*, keeps_tables: bool = False) -> Iterator[Cluster]:
    """Run a head with the label role=target, and a worker with role=draft.

    keeps_tables: on the disk of the head, for a GCS that is started again.
    """
    tag = secrets.token_hex(3)
    directory = Path(tempfile.mkdtemp(prefix="sd-"))  # Ray's sockets need a short path
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        head, worker = (stack.enter_context(_namespace(f"specdec-{x}-{tag}")) for x in "hw")
        connected = stack.enter_context(link(head, worker, INTERFACE))
        made = Cluster(head, worker, _environment(), directory, connected)
        stack.callback(subprocess.run, ["ip", "link", "del", f"sd{tag}"], capture_output=True)
        _connect(made, f"sd{tag}")
        tables = {}
        if keeps_tables:
            tables = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(directory / "gcs")}
        arguments = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        arguments += ["--temp-dir", str(made.directory)]
        _start(made, made.head, *arguments, "--labels=role=target", ip=HEAD, **tables)
        made.start_worker()
        yield made


@contextmanager
def _namespace(name: str) -> Iterator[str]:
    """Make a network namespace; at the end, kill the processes in it.

    `ray stop` would stop every Ray of the machine.
    """
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        yield name
    finally:
        with suppress(subprocess.CalledProcessError):
            _kill(processes_in(name))
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return inherited | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(Path.cwd()),
    }


def _connect(made: Cluster, outside: str) -> None:
    """Give the nodes their addresses, and the head one for clients. outside: device of those."""
    for namespace, address in ((made.head, HEAD), (made.worker, WORKER)):
        made.run(namespace, "ip", "link", "set", "lo", "up")
        made.run(namespace, "ip", "addr", "add", f"{address}/24", "dev", INTERFACE)
        made.run(namespace, "ip", "link", "set", INTERFACE, "up")
    for namespace, other in ((made.head, WORKER), (made.worker, HEAD)):
        # As in every pod: Ray determines the address of a node from its default route.
        made.run(namespace, "ip", "route", "add", "default", "via", other)
    peer = ["type", "veth", "peer", "name", "outside", "netns", made.head]
    subprocess.run(["ip", "link", "add", outside, *peer], check=True)
    subprocess.run(["ip", "addr", "add", f"{OUTSIDE}/24", "dev", outside], check=True)
    subprocess.run(["ip", "link", "set", outside, "up"], check=True)
    made.run(made.head, "ip", "addr", "add", f"{HEAD_OUTSIDE}/24", "dev", "outside")
    made.run(made.head, "ip", "link", "set", "outside", "up")


def _start(made: Cluster, namespace: str, *flags: str, ip: str, **variables: str) -> None:
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={ip}"]
    command += ["--num-cpus=2", "--disable-usage-stats"]
    command += [f"--object-store-memory={OBJECT_STORE_BYTES}"]
    started = subprocess.run(
        made.command(namespace, *command, *flags),
        env={**made.environment, **variables},
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
    )
    assert started.returncode == 0, started.stdout + started.stderr


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
