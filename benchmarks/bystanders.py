"""Other processes on the machine, which would spoil a measurement without leaving a trace.

On few cores one busy stranger slows multi-threaded products several times over, as their threads
wait for each other. So a measurement begins when the machine is quiet, and is repeated, a few
times, when strangers used it meanwhile; what they used is part of the result.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

import psutil

from specdec.models.resolve import print_progress

MAX_OTHERS_PERCENT = 10.0
"""Of one core: what strangers may use before a measurement counts as disturbed."""

_SAMPLE_S = 1.0


@dataclass(frozen=True)
class CpuUsage:
    """CPU seconds since some past moment, of this benchmark's process tree and of all others."""

    own_s: float
    others_s: float
    clock_s: float

    @classmethod
    def now(cls) -> CpuUsage:
        """Reads the counters of the machine and of every process of the tree."""
        own_s = tree_cpu_seconds(psutil.Process())
        times = psutil.cpu_times()
        # Time stolen by other virtual machines is as lost as any.
        busy_s = sum(times) - times.idle - times.iowait - times.guest - times.guest_nice
        return cls(own_s, busy_s - own_s, time.monotonic())

    def others_percent_since(self, before: CpuUsage) -> float:
        """What strangers used since then, in percent of one core."""
        elapsed_s = self.clock_s - before.clock_s
        return max(0.0, 100 * (self.others_s - before.others_s) / elapsed_s)


def tree_cpu_seconds(root: psutil.Process) -> float:
    """CPU time of a process and of all its living descendants."""
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def wait_until_quiet(limit_s: float) -> None:
    """Returns when strangers use little, or after `limit_s` seconds whatever they use."""
    deadline = time.monotonic() + limit_s
    if (percent := _sample()) > MAX_OTHERS_PERCENT:
        print_progress(f"waiting: other processes use {percent:.0f} % of a core")
    while percent > MAX_OTHERS_PERCENT and time.monotonic() < deadline:
        percent = _sample()


def _sample() -> float:
    before = CpuUsage.now()
    time.sleep(_SAMPLE_S)
    return CpuUsage.now().others_percent_since(before)
