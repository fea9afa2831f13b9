"""Memory of a replica's processes and GPUs, and which processes count."""

import ctypes
import os
import subprocess
import sys

import psutil
import pytest

from cluster.replica.memory import GpuMemory, MemoryMeter
from cluster.workers.group_spec import RankPlace
from tests.clock import Clock

GIB = 2**30


class Nvml:
    """The functions of NVML, over a driver with two GPUs of 80 GiB."""

    def __init__(self, error=0):
        self.error = error
        self.handles = {0: 10 * GIB, 1: 70 * GIB}  # used bytes
        self.uuids = {b"GPU-1": 1}

    def load(self, name):
        assert name == "libnvidia-ml.so.1"
        return self

    def nvmlInit_v2(self):  # noqa: N802
        return self.error

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):  # noqa: N802
        return self._found(handle, index.value)

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):  # noqa: N802
        return self._found(handle, self.uuids.get(uuid))

    def _found(self, handle, index):
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = 1 + (index or 0)
        return 0 if index in self.handles else 6

    def nvmlDeviceGetMemoryInfo(self, handle, memory):  # noqa: N802
        total, free, used = range(3)
        words = ctypes.cast(memory, ctypes.POINTER(ctypes.c_ulonglong))
        words[total], words[used] = 80 * GIB, self.handles[handle.value - 1]
        words[free] = words[total] - words[used]
        return 0


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (["0"], (80, 10)),
        (["0", "1", "0"], (160, 80)),
        (["GPU-1"], (80, 70)),
        (["2", "GPU-9", "all"], (0, 0)),
        ([], (0, 0)),
    ],
)
def test_the_memory_of_gpus_is_summed(devices, expected):
    gibs = tuple(value // GIB for value in GpuMemory(Nvml().load).total_and_used(devices))
    assert gibs == expected


def test_without_a_driver_no_gpu_is_known():
    def missing(name):
        raise OSError(name)

    for load in (missing, Nvml(error=9).load):
        assert GpuMemory(load).total_and_used(["0"]) == (0, 0)


def test_resident_memory_of_this_process_and_the_ranks_is_summed():
    script = "data = bytearray(64 << 20); print('filled', flush=True); input()"
    rank = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert rank.stdout.readline() == b"filled\n"
        places = [RankPlace("here", "a", rank.pid, "1"), RankPlace("here", "a", 2**22 + 1, "0,1")]
        use = MemoryMeter(GpuMemory(Nvml().load)).read(places)
        own, theirs = (psutil.Process(pid).memory_info().rss for pid in (os.getpid(), rank.pid))
    finally:
        rank.communicate(b"\n")
    assert theirs > 64 << 20
    assert use.process_bytes == pytest.approx(own + theirs, rel=0.02), "an ended rank has none"
    assert 0 < use.process_bytes < use.node_used_bytes < use.node_bytes
    assert (use.gpu_bytes, use.gpu_used_bytes) == (160 * GIB, 80 * GIB)


def test_a_reading_holds_for_a_second():
    clock = Clock()
    meter = MemoryMeter(GpuMemory(Nvml().load), clock)
    first = meter.read([])
    clock.now_s += 0.9
    assert meter.read([RankPlace("here", "a", os.getpid(), "0")]) is first
    clock.now_s += 0.2
    assert meter.read([RankPlace("here", "a", os.getpid(), "0")]).gpu_bytes == 80 * GIB


def test_a_replica_on_cpus_loads_no_library(monkeypatch):
    monkeypatch.setattr("cluster.replica.memory.GpuMemory", None)
    for visible in (None, "", " "):
        assert MemoryMeter().read([RankPlace("here", "a", os.getpid(), visible)]).gpu_bytes == 0
