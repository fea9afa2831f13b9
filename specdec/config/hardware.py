"""This machine: memory, CPU cores, GPUs, and the directory of the cache."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import psutil

from specdec.config.control_group import cpu_quotas, memory_limits
from specdec.types.errors import InvalidValueError

_GPU_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))
"""Device files of the GPU drivers that torch supports: NVIDIA's, the one under WSL, and AMD's."""


def resolved_device(device: str) -> str:
    """Return the device; auto becomes cuda if torch finds a GPU, and cpu otherwise."""
    if device != "auto":
        return device
    if not any(driver.exists() for driver in _GPU_DRIVERS):
        return "cpu"
    import torch  # here, as it takes seconds and is not needed without a driver

    return "cuda" if torch.cuda.is_available() else "cpu"


_CPU_INFO = Path("/proc/cpuinfo")
_SYSTEM_TIMES = Path("/proc/stat")
_NUM_TIMES, _IDLE_TIMES = 8, slice(3, 5)
"""Fields of a core: before those of guests, which others include; and idle or waiting for I/O."""


def available_memory_bytes() -> int:
    """Return the available memory of the machine or of its control groups, the smallest."""
    left = (each.available_bytes for each in memory_limits())
    return min([psutil.virtual_memory().available, *left])


def memory_bytes() -> int:
    """Return the memory of the machine or of its control groups, the smallest."""
    limits = (each.limit_bytes for each in memory_limits())
    return min([psutil.virtual_memory().total, *limits])


def available_cpus() -> int:
    """Return the number of cores of this process, within the CPU quotas of its control groups."""
    return max(1, int(min([len(os.sched_getaffinity(0)), *cpu_quotas()])))


class LoadOfOthers:
    """Load that other processes put on this process's cores, since it was last read or created."""

    def __init__(self, process: psutil.Process | None = None) -> None:
        """process: whose load is left out; this one by default."""
        self._process = process or psutil.Process()
        self._read_at_s, self._others_s = time.monotonic(), self._seconds()

    def num_cores(self) -> float:
        """Return how many cores were busy on average."""
        now_s, others_s = time.monotonic(), self._seconds()
        used = (others_s - self._others_s) / max(now_s - self._read_at_s, 1e-3)
        self._read_at_s, self._others_s = now_s, others_s
        return max(0.0, used)

    def share(self, interval_s: float = 0.3, sleep: Callable[[float], None] = time.sleep) -> float:
        """Return the share of the cores' time, 0 to 1; wait until `interval_s` have passed."""
        sleep(max(0.0, self._read_at_s + interval_s - time.monotonic()))
        return min(1.0, self.num_cores() / len(os.sched_getaffinity(0)))

    def _seconds(self) -> float:
        own = self._process.cpu_times()
        return _busy_s() - own.user - own.system


def _busy_s() -> float:
    """Return the seconds that the cores of this process have worked since the system started.

    The time that a hypervisor gave to other virtual machines is included. psutil does not name the
    cores that it lists, which are those online.
    """
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    lines = (line.split() for line in _SYSTEM_TIMES.read_text(encoding="ascii").splitlines())
    times = [list(map(int, numbers)) for name, *numbers in lines if name in cores]
    ticks = sum(sum(each[:_NUM_TIMES]) - sum(each[_IDLE_TIMES]) for each in times)
    return ticks / os.sysconf("SC_CLK_TCK")


def processor_name() -> str:
    """Return the model of the processor; its architecture where the system does not name it."""
    lines = _CPU_INFO.read_text(encoding="utf-8").splitlines() if _CPU_INFO.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def num_gpus() -> int:
    """Return the number of GPUs that torch finds."""
    import torch  # here, as only GPU processes need it

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpu_name() -> str:
    """Return the name of the first GPU. Raises InvalidValueError without a GPU."""
    import torch

    require_gpu()
    return torch.cuda.get_device_name(0)


def smallest_gpu_bytes() -> int:
    """Return the smallest free memory of the GPUs. Raises InvalidValueError without a GPU."""
    import torch

    require_gpu()
    return min(torch.cuda.mem_get_info(index)[0] for index in range(num_gpus()))


def require_gpu() -> None:
    """Raise InvalidValueError where torch finds no GPU."""
    if num_gpus() == 0:
        raise InvalidValueError("device", "cuda", "cpu or auto, as torch finds no GPU")


def has_triton_package() -> bool:
    """Return whether Triton is installed, in the environment that all ranks share."""
    return find_spec("triton") is not None


def default_cache_dir() -> Path:
    """Return the directory of downloaded models and compiled kernels.

    It is $SPECDEC_CACHE_DIR, $XDG_CACHE_HOME/specdec or ~/.cache/specdec, by precedence.
    """
    if own := os.environ.get("SPECDEC_CACHE_DIR"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "specdec"
