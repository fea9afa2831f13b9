"""Limits of control groups, of both versions."""

from pathlib import Path

import pytest

from specdec.config import control_group, hardware
from specdec.config.control_group import MemoryLimit, cpu_quotas, memory_limits

GIB = 2**30


@pytest.fixture
def write(monkeypatch, tmp_path):
    """Return a function that writes files below the root of all groups."""
    monkeypatch.setattr(control_group, "_ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(control_group, "_MEMBERSHIP", tmp_path / "membership")

    def write_files(membership, **files):
        (tmp_path / "membership").write_text(membership)
        for name, text in files.items():
            path = tmp_path / "cgroup" / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")

    return lambda membership, files: write_files(membership, **files)


def test_without_groups_there_is_no_limit(write):
    assert memory_limits() == cpu_quotas() == []


def test_a_container_has_the_limits_of_the_root(write):
    files = {"memory.max": 8 * GIB, "memory.current": 5 * GIB, "cpu.max": "150000 100000"}
    write("0::/\n", {**files, "memory.stat": f"anon 1\ninactive_file {GIB}\nactive_file {GIB}"})
    assert memory_limits() == [MemoryLimit(8 * GIB, 3 * GIB)]
    assert memory_limits()[0].available_bytes == 5 * GIB
    assert cpu_quotas() == [1.5]


def test_a_unit_has_the_limits_of_its_group_and_of_the_slices_around_it(write):
    """Systemd and Slurm set such ones: the root of a host has none."""
    unit, part = "system.slice__specdec.service", "system.slice"
    files = {f"{unit}__memory.max": 4 * GIB, f"{unit}__memory.current": GIB}
    files |= {f"{part}__memory.max": 3 * GIB, f"{part}__memory.current": 4 * GIB}
    files |= {f"{unit}__cpu.max": "max 100000", f"{part}__cpu.max": "200000 100000"}
    write("0::/system.slice/specdec.service\n", {**files, "cpu.max": "max 100000"})
    assert memory_limits() == [MemoryLimit(4 * GIB, GIB), MemoryLimit(3 * GIB, 4 * GIB)]
    assert memory_limits()[1].available_bytes == 0
    assert cpu_quotas() == [2.0]


VERSION_1 = "4:memory:{0}\n3:cpuset:/x\n1:cpu,cpuacct:{0}\n0::/\n"


@pytest.mark.parametrize("place", ["job/1", ""])
def test_version_1_has_a_hierarchy_for_each_resource(write, place):
    """In a container the path in /proc is that on the host, and its own group is the root."""
    at = f"{place.replace('/', '__')}__" if place else ""
    files = {"memory.limit_in_bytes": 2 * GIB, "memory.usage_in_bytes": GIB}
    files["memory.stat"] = f"inactive_file 1\ntotal_inactive_file {GIB // 2}\ntotal_active_file 0"
    of_cpu = {"cpu.cfs_quota_us": 50000, "cpu.cfs_period_us": 100000}
    own = {f"memory__{at}{name}": each for name, each in files.items()}
    own |= {f"cpu__{at}{name}": each for name, each in of_cpu.items()}
    write(VERSION_1.format("/job/1"), own)
    assert memory_limits() == [MemoryLimit(2 * GIB, GIB // 2)]
    assert cpu_quotas() == [0.5]


def test_groups_without_limits_of_version_1_have_none(write):
    files = {
        "memory__memory.limit_in_bytes": 9223372036854771712,
        "memory__memory.usage_in_bytes": 1,
    }
    write(
        VERSION_1.format("/"), {**files, "cpu__cpu.cfs_quota_us": -1, "cpu__cpu.cfs_period_us": 9}
    )
    assert memory_limits() == cpu_quotas() == []


def test_a_group_outside_the_visible_ones_counts_as_the_root(write):
    write("0::/../other\n", {"memory.max": GIB, "memory.current": 0})
    assert memory_limits() == [MemoryLimit(GIB, 0)]


def test_the_machine_has_what_its_groups_leave(write, monkeypatch):
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda _: set(range(8)))
    assert hardware.available_cpus() == 8
    write("0::/\n", {"memory.max": 64 * 2**20, "memory.current": 2**20, "cpu.max": "250000 100000"})
    assert hardware.available_memory_bytes() == 63 * 2**20
    assert hardware.memory_bytes() == 64 * 2**20
    assert hardware.available_cpus() == 2
    write("0::/\n", {"cpu.max": "50000 100000"})
    assert hardware.available_cpus() == 1


def test_the_groups_of_this_process_are_read():
    assert all(isinstance(each, MemoryLimit) for each in memory_limits())
    assert Path("/proc/self/cgroup").exists()
