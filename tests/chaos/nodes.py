"""The service of the chaos suite on two Ray nodes, and the faults of their network and of Ray.

The target is on the head, its draft model on the second node. GCS keeps its tables on the disk of
the head: Ray's fault tolerance of GCS.
"""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from tests.chaos.faults import DRAFT_WORKER, SPARE_WORKER, Fault, Kill, Site, Stop, Toggle, Victim
from tests.e2e.link import Condition, Link
from tests.e2e.two_nodes import HEAD_OUTSIDE, Cluster, cluster, joined_service

MIN_S, MAX_S = 5.0, 15.0
MAX_PARTITION_S = 5.0
"""GCS gives up a node that does not respond for 15 s, and ends its processes."""
RESTART_S = 2.0
"""Until a supervisor starts again what was killed."""
_DRAFT = (
    '{"method": "draft_model", "num_speculative_tokens": 3, "policy": "threshold",'
    ' "draft_tensor_parallel_size": 1}'
)
FLAGS = ["--host", "0.0.0.0", "--max-model-len", "512", "--max-queue-len", "16"]
FLAGS += ["--target-labels", "role=target", "--draft-labels", "role=draft"]
FLAGS += ["--speculative-config", _DRAFT]


@contextmanager
def two_nodes(model: Path, log: Path) -> Iterator[Victim]:
    """Run the service on two nodes."""
    with (
        cluster(keeps_tables=True) as made,
        joined_service(made, log, "--model", str(model), *FLAGS),
    ):
        yield Victim(made, f"{HEAD_OUTSIDE}:9000", f"http://{HEAD_OUTSIDE}:8000", _faults(made))


def _faults(made: Cluster) -> list[Fault]:
    return [
        LinkFault("partition", made.link, Condition(loss=1.0), 1.0, MAX_PARTITION_S),
        LinkFault("30 % loss", made.link, Condition(loss=0.3)),
        LinkFault("500 ms delay", made.link, Condition(delay_s=0.5)),
        LostGcs(made),
        LostNode(made),
        Kill(DRAFT_WORKER),
        Kill(SPARE_WORKER),
        Kill("TargetWorker"),
        Stop(DRAFT_WORKER),
        Toggle(),
    ]


@dataclass(frozen=True)
class LinkFault(Fault):
    """A condition of the link between the nodes, for some seconds."""

    title: str
    link: Link
    condition: Condition
    min_s: float = MIN_S
    max_s: float = MAX_S

    @property
    def name(self) -> str:
        return self.title

    def inject(self, site: Site, generator: random.Random) -> str:
        seconds = generator.uniform(self.min_s, self.max_s)
        self.link.set(replace(self.condition, seed=generator.randrange(2**31)))
        time.sleep(seconds)
        self.link.set(Condition())
        return f"{seconds:.1f} s"


@dataclass(frozen=True)
class LostNode(Fault):
    """SIGKILL of the raylet of the second node, which is then started again, as a pod is."""

    cluster: Cluster
    name = "kill -9 raylet"

    def inject(self, site: Site, generator: random.Random) -> str:
        victims = _running(self.cluster, self.cluster.worker, "raylet")
        for each in victims:
            each.kill()
        time.sleep(RESTART_S)
        self.cluster.end_worker()
        self.cluster.start_worker()
        return f"pid {', '.join(str(each.pid) for each in victims)}"


@dataclass(frozen=True)
class LostGcs(Fault):
    """SIGKILL of GCS, which is then started again with its tables."""

    cluster: Cluster
    name = "kill -9 GCS"

    def inject(self, site: Site, generator: random.Random) -> str:
        [victim] = _running(self.cluster, self.cluster.head, "gcs_server")
        command, environment = victim.cmdline(), victim.environ()
        victim.kill()
        time.sleep(RESTART_S)
        # An orphan, as the other processes of Ray.
        again = self.cluster.command(self.cluster.head, "setsid", "--fork", *command)
        nowhere = subprocess.DEVNULL
        subprocess.run(again, check=True, env=environment, stdout=nowhere, stderr=nowhere)
        return f"pid {victim.pid}"


def _running(cluster: Cluster, namespace: str, program: str) -> list[psutil.Process]:
    """Return the processes of a program on a node."""
    found = []
    for each in cluster.processes_on(namespace):
        with suppress(psutil.Error):  # it has just ended
            if Path(each.exe()).name == program:
                found.append(each)
    return found
