"""CPU usage of other processes on the machine, which would disturb a measurement unnoticed.

On few cores one other busy process slows multi-threaded kernels down several times, because their
threads wait for each other. So a measurement starts when the machine is idle and is repeated, up to
a limit, if other processes used CPU meanwhile. Their CPU usage is part of the result.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

import psutil

from specdec.models.resolve import print_progress

MAX_OTHERS_PERCENT = 10.0
"""CPU usage of other processes, in percent of one core, above which a measurement is disturbed."""

_SAMPLE_S = 1.0


@dataclass(frozen=True)
class CpuUsage:
    """CPU seconds since a fixed moment, of this benchmark's processes and of all others."""

    own_s: float
    others_s: float
    clock_s: float

    @classmethod
    def now(cls) -> CpuUsage:
        """Read the counters of the machine and of each process in the tree."""
        own_s = tree_cpu_seconds(psutil.Process())
        times = psutil.cpu_times()
        # Includes the time stolen by other virtual machines.
        busy_s = sum(times) - times.idle - times.iowait - times.guest - times.guest_nice
        return cls(own_s, busy_s - own_s, time.monotonic())

    def others_percent_since(self, before: CpuUsage) -> float:
        """Return the CPU usage of other processes since `before`, in percent of one core."""
        elapsed_s = self.clock_s - before.clock_s
        return max(0.0, 100 * (self.others_s - before.others_s) / elapsed_s)


def tree_cpu_seconds(root: psutil.Process) -> float:
    """Return the CPU time of a process and all its living descendants."""
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def wait_until_quiet(limit_s: float) -> None:
    """Wait until other processes use little CPU, at most `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    if (percent := _sample()) > MAX_OTHERS_PERCENT:
        print_progress(f"waiting: other processes use {percent:.0f} % of a core")
    while percent > MAX_OTHERS_PERCENT and time.monotonic() < deadline:
        percent = _sample()


def _sample() -> float:
    before = CpuUsage.now()
    time.sleep(_SAMPLE_S)
    return CpuUsage.now().others_percent_since(before)
