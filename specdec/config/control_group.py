"""Limits that Linux control groups set to this process: containers, pods, units and jobs have one.

A process is in one group of a hierarchy, of version 2, or of version 1 for each kind of resource.
The limits of the groups that contain it apply as well. In a container its own group is the root.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_UNLIMITED_BYTES = 2**60
"""Version 1 writes the largest number of pages as the limit of a group without one."""


class MemoryLimit(NamedTuple):
    """Limit of a group. used_bytes: without pages of files that the kernel can reclaim."""

    limit_bytes: int
    used_bytes: int

    @property
    def available_bytes(self) -> int:
        """Bytes that may still be used."""
        return max(0, self.limit_bytes - self.used_bytes)


def memory_limits() -> list[MemoryLimit]:
    """Return the limits of the memory of this process, of its group and of those around it."""
    names = ("memory.max", "memory.current", "")
    found = [_memory_limit(group, *names) for group in _groups("", _ROOT)]
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    found += [_memory_limit(group, *names) for group in _groups("memory", _ROOT / "memory")]
    return [each for each in found if each is not None]


def cpu_quotas() -> list[float]:
    """Return the numbers of cores whose time this process may use, likewise."""
    found = [_read(group, "cpu.max").split() for group in _groups("", _ROOT)]
    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    found += [[_read(group, each) for each in names] for group in _groups("cpu", _ROOT / "cpu")]
    numbers = ([_int(each) for each in pair] for pair in found)
    return [pair[0] / pair[1] for pair in numbers if len(pair) == 2 and pair[0] and pair[1]]


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the directories of the group of a controller and of those around it, up to the root.

    controller: of version 1; empty for version 2. root: where its hierarchy is mounted. A part of
    it may be: then the group has another path there, and only the directories that exist count.
    """
    path = root / _path_of(controller).lstrip("/")
    for each in (path, *path.parents):
        if each.is_dir():
            yield each
        if each == root:
            return


def _path_of(controller: str) -> str:
    try:
        lines = _MEMBERSHIP.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") and ".." not in Path(path).parts:
            return path
    return ""


def _memory_limit(group: Path, limit: str, usage: str, prefix: str) -> MemoryLimit | None:
    limit_bytes, used_bytes = _int(_read(group, limit)), _int(_read(group, usage))
    if limit_bytes is None or used_bytes is None or limit_bytes >= _UNLIMITED_BYTES:
        return None
    pairs = (line.split() for line in _read(group, "memory.stat").splitlines())
    # Of files that were read twice, as a checkpoint is on a restart, they are active.
    reclaimable = (f"{prefix}inactive_file", f"{prefix}active_file")
    freed = sum(int(value) for name, value in pairs if name in reclaimable)
    return MemoryLimit(limit_bytes, used_bytes - freed)


def _int(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _read(group: Path, name: str) -> str:
    """Return the contents of a file; empty without it."""
    try:
        return (group / name).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
