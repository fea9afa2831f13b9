"""Available hardware: memory, CPU cores, GPUs."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from specdec.types.errors import InvalidValueError

_GPU_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))
"""Device files of the GPU drivers that torch supports: NVIDIA's, the one under WSL, and AMD's."""


def resolved_device(device: str) -> str:
    """Resolve auto: cuda where torch finds a GPU, else cpu."""
    if device != "auto":
        return device
    if not any(driver.exists() for driver in _GPU_DRIVERS):
        return "cpu"
    import torch  # takes seconds, and is not needed without a driver

    return "cuda" if torch.cuda.is_available() else "cpu"


_CONTROL_GROUP = Path("/sys/fs/cgroup")


def available_memory_bytes() -> int:
    """Return the bytes that can be allocated now, by the machine and by the control group."""
    available = psutil.virtual_memory().available
    limit, used = _read_int("memory.max"), _read_int("memory.current")
    if limit is None or used is None:
        return available
    # The page cache is reclaimed when memory is needed.
    return min(available, max(0, limit - used + _reclaimable_bytes()))


def available_cpus() -> int:
    """Return the cores that this process may run on, at most the control group's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = (_read("cpu.max") or "max 1").partition(" ")
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def num_gpus() -> int:
    """Return the number of GPUs that torch finds."""
    import torch  # only in processes that use GPUs

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def smallest_gpu_bytes() -> int:
    """Return the free bytes of the fullest GPU. Raise InvalidValueError where torch finds none."""
    import torch

    count = num_gpus()
    if count == 0:
        raise InvalidValueError("device", "cuda", "cpu, or auto, where torch finds no GPU")
    return min(torch.cuda.mem_get_info(index)[0] for index in range(count))


def _reclaimable_bytes() -> int:
    lines = (_read("memory.stat") or "").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))


def _read_int(name: str) -> int | None:
    text = _read(name) or ""
    return int(text) if text.isdigit() else None


def _read(name: str) -> str | None:
    """Return a file of this process's control group (version 2); None without one."""
    try:
        return (_CONTROL_GROUP / name).read_text().strip()
    except OSError:
        return None
