"""Hardware and software versions of a measurement."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Machine:
    """Hardware and versions that determine speed."""

    measured_at: str
    cpu_model: str
    num_cores: int
    memory_gib: float
    python: str
    torch: str
    transformers: str
    ray: str


def describe_machine() -> Machine:
    """Describe this machine."""
    return Machine(
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        cpu_model=_cpu_model(),
        num_cores=num_usable_cores(),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        python=platform.python_version(),
        torch=version("torch"),
        transformers=version("transformers"),
        ray=version("ray"),
    )


def num_usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")
