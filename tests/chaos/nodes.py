"""Chaos between two Ray nodes, in network namespaces: loss, delay, partition, a lost node.

The target is on the head, the draft model on the other node. The clients are a process in the
head's namespace (`python -m tests.chaos.nodes PORTS`), which reports its history as JSON when its
input is closed.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.history import violations
from tests.chaos.suite import DRAFT, NUM_CLIENTS
from tests.chaos.traffic import BROKEN, REFUSALS, Traffic
from tests.e2e.two_nodes import INTERFACE, Cluster, JoinedService, cluster, joined_service

GRPC_ADDRESS, HTTP_URL = "127.0.0.1:9000", "http://127.0.0.1:8000"
LOSS, DELAY_MS = 0.3, 500
MIN_S, MAX_S = 3.0, 8.0
PAUSE_S = 3.0
END_TIMEOUT_S = 180.0
FLAGS = ["--tensor-parallel-size", "1", "--max-model-len", "512", "--max-queue-len", "16"]
FLAGS += ["--target-labels", "role=target", "--draft-labels", "role=draft"]
FLAGS += ["--speculative-config", DRAFT]


@dataclass
class NodesReport:
    """What was put in, in order, and what was wrong. num_calls: of all clients."""

    injected: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    num_calls: int = 0


def run(model: Path, directory: Path, num_faults: int, seed: int) -> NodesReport:
    """Put `num_faults` faults into the link, and kill the other node's raylet at the end."""
    generator, report = random.Random(f"nodes {seed}"), NodesReport()
    flags = ["--model", str(model), *FLAGS]
    with cluster() as made, joined_service(made, directory / "log", *flags) as service:
        with _clients(service, seed) as clients:
            for _ in range(num_faults):
                time.sleep(PAUSE_S)
                report.injected.append(_fault(made, generator))
            time.sleep(PAUSE_S)
            report.injected.append(_kill_raylet(service))
            time.sleep(PAUSE_S)
        history = json.loads(clients.communicate(timeout=END_TIMEOUT_S)[0])
        report.num_calls, report.violations = history["num_calls"], history["violations"]
    return report


@contextmanager
def _clients(service: JoinedService, seed: int) -> Iterator[subprocess.Popen[str]]:
    """Run the clients until the end of the block, in the head's namespace."""
    made = service.cluster
    command = made.command(made.head, sys.executable, "-m", "tests.chaos.nodes", str(seed))
    process = subprocess.Popen(
        command, env=made.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "started\n"
        yield process
        process.stdin.write("stop\n")
        process.stdin.flush()
    except BaseException:
        process.kill()
        raise


def _fault(made: Cluster, generator: random.Random) -> str:
    """Put one fault into the link for some seconds."""
    name, seconds = (
        generator.choice(("loss", "partition", "delay")),
        generator.uniform(MIN_S, MAX_S),
    )
    try:
        if name == "delay":
            _delay(made)
        else:
            made.lose_packets(LOSS if name == "loss" else 1.0)
        time.sleep(seconds)
    except subprocess.CalledProcessError as error:
        return f"{name} is not possible here: {error.stderr.decode().strip()}"
    finally:
        made.lose_none()
        subprocess.run(
            made.command(made.head, "tc", "qdisc", "del", "dev", INTERFACE, "root"),
            capture_output=True,
        )
    return f"{name} for {seconds:.1f} s"


def _delay(made: Cluster) -> None:
    netem = ["netem", "delay", f"{DELAY_MS}ms"]
    made.run(made.head, "tc", "qdisc", "add", "dev", INTERFACE, "root", *netem)


def _kill_raylet(service: JoinedService) -> str:
    made = service.cluster
    [raylet] = [
        each for each in service.named(made.worker, "raylet/raylet") if each.name() == "raylet"
    ]
    raylet.kill()
    return "kill -9 of the other node's raylet"


def clients(seed: int) -> dict[str, object]:
    """Send requests until a line is read; return what was wrong with their history."""
    traffic = Traffic(GRPC_ADDRESS, HTTP_URL, seed)
    traffic.learn()
    traffic.start(NUM_CLIENTS)
    print("started", flush=True)
    sys.stdin.readline()
    traffic.stop()
    calls = [each.call for each in traffic.outcomes]
    found = traffic.overdue + violations(calls, REFUSALS | {BROKEN})
    return {"num_calls": len(calls), "violations": found}


if __name__ == "__main__":
    print(json.dumps(clients(int(sys.argv[1]))))
