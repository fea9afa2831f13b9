"""Faults that are put into a running service, each with its undoing."""

from __future__ import annotations

import random
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import psutil

from specdec.client import AdminClient, ClientError
from specdec.types.control import SpeculationChange
from tests.chaos.traffic import ProcessTree, Traffic, processes

MIN_STOP_S, MAX_STOP_S = 1.0, 20.0
DESCRIPTORS_S = 5.0
DISK_S = 5.0


@dataclass(frozen=True)
class Site:
    """What a fault needs to know of the service."""

    root: ProcessTree
    traffic: Traffic
    state_dir: Path
    num_clients: int


class Fault(ABC):
    """A fault. `inject` returns when it is undone, if it is one that is undone."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name in the report, and for `--only`."""

    def applies(self, root: ProcessTree) -> bool:
        """Return whether the service below `root` has what the fault is about."""
        return True

    @abstractmethod
    def inject(self, site: Site, generator: random.Random) -> str:
        """Put it in; return details for the report."""


@dataclass(frozen=True)
class Victim:
    """A running service, and the faults that can be put into it."""

    root: ProcessTree
    grpc_address: str
    http_url: str
    faults: Sequence[Fault]


@dataclass(frozen=True)
class ActorFault(Fault):
    """A fault of one process of an actor."""

    actor: str
    verb: ClassVar[str]

    @property
    def name(self) -> str:
        return f"{self.verb} {self.actor}"

    def applies(self, root: ProcessTree) -> bool:
        return bool(processes(root, self.actor))

    def inject(self, site: Site, generator: random.Random) -> str:
        found = processes(site.root, self.actor)
        if not found:
            return "no such process"
        with suppress(psutil.NoSuchProcess):
            return self.harm(generator.choice(found), generator)
        return "it had just ended"

    @abstractmethod
    def harm(self, victim: psutil.Process, generator: random.Random) -> str:
        """Do it; return details for the report."""


class Kill(ActorFault):
    """SIGKILL."""

    verb = "kill -9"

    def harm(self, victim: psutil.Process, generator: random.Random) -> str:
        victim.kill()
        return f"pid {victim.pid}"


class Stop(ActorFault):
    """SIGSTOP for some seconds: a grey failure."""

    verb = "SIGSTOP"

    def harm(self, victim: psutil.Process, generator: random.Random) -> str:
        seconds = generator.uniform(MIN_STOP_S, MAX_STOP_S)
        victim.suspend()
        time.sleep(seconds)
        victim.resume()
        return f"{seconds:.1f} s"


class Burst(Fault):
    """Ten times the requests, at once."""

    name = "10 x load"

    def inject(self, site: Site, generator: random.Random) -> str:
        site.traffic.burst(site.num_clients)
        return f"{site.num_clients * 10} requests"


class Descriptors(Fault):
    """The Router may open no further file or connection for some seconds."""

    name = "out of descriptors"

    def inject(self, site: Site, generator: random.Random) -> str:
        [*found] = processes(site.root, ":Router")
        if not found:
            return "no such process"
        victim = generator.choice(found)
        with suppress(psutil.NoSuchProcess):
            limits = victim.rlimit(resource.RLIMIT_NOFILE)
            victim.rlimit(resource.RLIMIT_NOFILE, (victim.num_fds() + 1, limits[1]))
            time.sleep(DESCRIPTORS_S)
            victim.rlimit(resource.RLIMIT_NOFILE, limits)
        return f"{DESCRIPTORS_S:g} s"


class FullDisk(Fault):
    """The file system of the state directory is full for some seconds."""

    name = "full disk"

    def inject(self, site: Site, generator: random.Random) -> str:
        filler = site.state_dir / "filler"
        try:
            with filler.open("wb") as file, suppress(OSError):
                while True:
                    file.write(bytes(65_536))
                    file.flush()
            refused = _toggle(site.traffic.grpc_address, generator)
            time.sleep(DISK_S)
        finally:
            filler.unlink(missing_ok=True)
        return f"a setting was {'refused: ' + refused if refused else 'accepted'}"


class Toggle(Fault):
    """A change of the speculation settings."""

    name = "toggle"

    def inject(self, site: Site, generator: random.Random) -> str:
        return _toggle(site.traffic.grpc_address, generator) or "in force"


def _toggle(address: str, generator: random.Random) -> str:
    """Change a setting; return the status of a refusal, or an empty string."""
    change = generator.choice(
        (
            SpeculationChange(mode="on"),
            SpeculationChange(mode="off"),
            SpeculationChange(mode="auto", threshold=generator.randint(0, 16)),
            SpeculationChange(num_speculative_tokens=generator.randint(1, 5)),
            SpeculationChange(reset=True),
        )
    )
    try:
        with AdminClient(address) as admin:
            admin.set_speculation(change)
    except ClientError as error:
        return error.code.name
    return ""


DRAFT_WORKER, SPARE_WORKER = "DraftWorker.run", "DraftWorker.stand_by"
"""Ray's title of a process ends in the method that it executes."""
FRONT_END = "cluster.api.front_ends.process"
ACTORS = (DRAFT_WORKER, SPARE_WORKER, "TargetWorker", ":Router", FRONT_END)
ACTORS += ("ControlPlane", "ServeController", "ProxyActor")


def all_faults(*, has_small_disk: bool) -> Sequence[Fault]:
    """Return every fault that can be put in on this machine, a random choice takes one."""
    made: list[Fault] = [Kill(actor) for actor in ACTORS]
    made += [Stop(actor) for actor in ACTORS]
    made += [Burst(), Descriptors(), Toggle(), Toggle()]
    return [*made, FullDisk()] if has_small_disk else made
