"""What the machine has that models need: memory, cores, GPUs."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from specdec.types.errors import InvalidValueError

_GPU_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))
"""What there is where torch may find a GPU: NVIDIA's driver, the one under WSL, and AMD's."""


def resolved_device(device: str) -> str:
    """The device that is meant: auto is cuda where torch finds a GPU, and cpu elsewhere."""
    if device != "auto":
        return device
    if not any(driver.exists() for driver in _GPU_DRIVERS):
        return "cpu"
    import torch  # takes seconds, and is not needed to see that there is no driver

    return "cuda" if torch.cuda.is_available() else "cpu"


_CONTROL_GROUP = Path("/sys/fs/cgroup")


def available_memory_bytes() -> int:
    """Memory that can be taken now, of the machine or of the control group, the smaller one."""
    available = psutil.virtual_memory().available
    limit, used = _read_int("memory.max"), _read_int("memory.current")
    if limit is None or used is None:
        return available
    # Pages of files that were read or written are given back when memory is asked for.
    return min(available, max(0, limit - used + _reclaimable_bytes()))


def available_cpus() -> int:
    """Cores that this process may run on, whole ones of the control group's quota."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = (_read("cpu.max") or "max 1").partition(" ")
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def num_gpus() -> int:
    """That torch finds."""
    import torch  # here, for a process that asks for GPUs alone

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def smallest_gpu_bytes() -> int:
    """What is free on the fullest GPU; raises InvalidValueError where torch finds none."""
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
    """A file of this process's control group (version 2), where there is one."""
    try:
        return (_CONTROL_GROUP / name).read_text().strip()
    except OSError:
        return None
