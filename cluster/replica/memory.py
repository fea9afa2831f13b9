"""Memory of a replica's processes, its node and its GPUs, for its reports."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import psutil

from cluster.workers.group_spec import RankPlace
from specdec.config.hardware import available_memory_bytes, memory_bytes
from specdec.types.reports.fleet import MemoryUse

_HOLDS_S = 1.0
_NVML = "libnvidia-ml.so.1"
_UUIDS = ("GPU-", "MIG-")


class _NvmlMemory(ctypes.Structure):
    """Memory of a GPU in bytes: nvmlMemory_t."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class GpuMemory:
    """Memory of GPUs by NVML, the library of the driver: without a CUDA context, which takes some.

    Where the library is missing or fails, no GPU is known.
    """

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        """load: returns a shared library by its name, or raises OSError."""
        self._nvml: Any = None
        with suppress(OSError, AttributeError):  # no driver, or an older one
            nvml = load(_NVML)
            self._nvml = nvml if nvml.nvmlInit_v2() == 0 else None

    def total_and_used(self, devices: Iterable[str]) -> tuple[int, int]:
        """Return the bytes of GPUs and of those the used ones.

        devices: indices or UUIDs, as in CUDA_VISIBLE_DEVICES.
        """
        if self._nvml is None:
            return 0, 0
        found = [self._memory(device) for device in sorted({each.strip() for each in devices})]
        return sum(each.total for each in found), sum(each.used for each in found)

    def _memory(self, device: str) -> _NvmlMemory:
        """Return the memory of a GPU; zeros for one that NVML does not know."""
        handle, memory = ctypes.c_void_p(), _NvmlMemory()
        if device.startswith(_UUIDS):
            error = self._nvml.nvmlDeviceGetHandleByUUID(device.encode(), ctypes.byref(handle))
        elif device.isdecimal():
            index = ctypes.c_uint(int(device))
            error = self._nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
        else:
            return memory
        if error == 0:
            self._nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        return memory


class MemoryMeter:
    """Reads the memory of this process, of the ranks on its node, and of their GPUs."""

    def __init__(
        self, gpus: GpuMemory | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """clock: in seconds; a reading holds for one."""
        self._gpus = gpus
        self._clock = clock
        self._last: MemoryUse | None = None
        self._read_at_s = 0.0

    def read(self, ranks: Sequence[RankPlace]) -> MemoryUse:
        """Return the memory; ranks: those on this node."""
        now_s = self._clock()
        if self._last is None or now_s - self._read_at_s >= _HOLDS_S:
            self._last, self._read_at_s = self._measure(ranks), now_s
        return self._last

    def _measure(self, ranks: Sequence[RankPlace]) -> MemoryUse:
        pids = {os.getpid(), *(rank.pid for rank in ranks)}
        devices = [name for rank in ranks for name in (rank.visible_devices or "").split(",")]
        total = memory_bytes()
        return MemoryUse(
            sum(map(_resident_bytes, pids)),
            total,
            max(0, total - available_memory_bytes()),
            *self._gpu_bytes([name for name in devices if name.strip()]),
        )

    def _gpu_bytes(self, devices: Sequence[str]) -> tuple[int, int]:
        """Return the bytes of the GPUs and the used ones; a replica on CPUs loads no library."""
        if not devices:
            return 0, 0
        self._gpus = self._gpus or GpuMemory()
        return self._gpus.total_and_used(devices)


def _resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if it has ended."""
    with suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0
