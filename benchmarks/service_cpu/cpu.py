"""CPU time of the service's processes and threads, and a fixed loop that it is normalized by.

Linux counts the time of each thread in /proc/PID/task/TID/schedstat, in nanoseconds. The Router's
replica reports which of its threads is which, since their names in /proc are those of Ray.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

THREADS_FILE = "threads.json"
ENGINE, EVENT_LOOP = "engine thread", "event loop"
GRPC, ROUTER_REST = "gRPC threads", "rest of the Router"
FRONT_ENDS, RANK, OTHERS = "front ends", "rank", "Ray and driver"
PARTS = (ENGINE, EVENT_LOOP, GRPC, ROUTER_REST, FRONT_ENDS, RANK, OTHERS)
ROUTER_PARTS = PARTS[:5]

REFERENCE_LOOP_US = 0.125
"""CPU time of a turn of the loop on the machine of the published figures, an AMD EPYC."""

_NUM_TURNS = 100_000
_GRPC_NAMES = ("event_engine", "grpc", "default-execut", "resolver-execu", "timer_manager")

Times = Mapping[tuple[int, int], int]
"""Nanoseconds of CPU time by process and thread."""


def loop_us() -> float:
    """Return the microseconds of CPU time of a turn of a fixed loop of dictionary operations."""
    table = dict.fromkeys(range(64), 0)
    began_ns = time.thread_time_ns()
    for turn in range(_NUM_TURNS):
        table[turn & 63] = table[(turn * 7) & 63] + len(str(turn))
    return (time.thread_time_ns() - began_ns) / 1e3 / _NUM_TURNS


def normalized(microseconds: float, measured_loop_us: float) -> float:
    """Return a CPU time as the machine of the published figures would have taken."""
    return microseconds * REFERENCE_LOOP_US / measured_loop_us


@dataclass(frozen=True)
class ServiceThreads:
    """The processes and threads of a service.

    root: the process that deploys it. router: pid of the replica. threads: of the Router, the part
    by native id. rank: pid. front_ends: pids of the Router's child processes.
    """

    root: int
    router: int
    threads: Mapping[int, str]
    rank: int
    front_ends: frozenset[int] = frozenset()

    @classmethod
    def of(cls, root: int, directory: Path) -> ServiceThreads:
        """Identify the threads of a service that has started with the model of a directory."""
        reported = json.loads((directory / THREADS_FILE).read_text())
        router = psutil.Process(reported["pid"])
        return cls(
            root,
            router.pid,
            {tid: part for name, tid in reported["threads"].items() if (part := _part(name))},
            _rank_pid(root),
            frozenset(each.pid for each in router.children(recursive=True)),
        )

    def times(self) -> dict[tuple[int, int], int]:
        """Return the CPU time of every thread of the service until now."""
        processes = [psutil.Process(self.root)]
        processes += processes[0].children(recursive=True)
        found: dict[tuple[int, int], int] = {}
        for process in processes:
            with suppress(FileNotFoundError, ProcessLookupError):
                found |= _times_of(process.pid)
        return found

    def part_of(self, pid: int, tid: int) -> str:
        """Return the part of the service that a thread belongs to."""
        if pid == self.router:
            return self.threads.get(tid) or _router_part(pid, tid)
        if pid == self.rank:
            return RANK
        return FRONT_ENDS if pid in self.front_ends else OTHERS

    def used_us(self, before: Times, after: Times) -> dict[str, float]:
        """Return the microseconds that each part used; a new thread counts from its start."""
        used = dict.fromkeys(PARTS, 0.0)
        for (pid, tid), now_ns in after.items():
            if spent_ns := now_ns - before.get((pid, tid), 0):
                used[self.part_of(pid, tid)] += spent_ns / 1e3
        return used


def _part(name: str) -> str | None:
    """Return the part of a Router's thread by its Python name; None where /proc has its name."""
    if "_poll_wrapper" in name:
        return GRPC
    return {"engine": ENGINE, EVENT_LOOP: EVENT_LOOP}.get(name)


def _router_part(pid: int, tid: int) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):
        name = Path(f"/proc/{pid}/task/{tid}/comm").read_text()
        return GRPC if name.startswith(_GRPC_NAMES) else ROUTER_REST
    return ROUTER_REST


def _times_of(pid: int) -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            found[pid, int(task.name)] = int((task / "schedstat").read_text().split()[0])
    return found


def _rank_pid(root: int) -> int:
    children = psutil.Process(root).children(recursive=True)
    [pid] = [each.pid for each in children if "ClockedWorker" in " ".join(each.cmdline())]
    return pid
