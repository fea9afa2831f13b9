"""The record of the compiled GPU kernels, and its limits."""

from dataclasses import replace

import pytest

from tools.gpu_kernels.report import MAX_SPILLED_BYTES, Resources, faults_of, read_report

USED = Resources(registers=40, spilled_bytes=0, shared_bytes=1024)


def test_recorded_kernels_are_within_the_limits():
    recorded = read_report()
    assert {target for targets in recorded.values() for target in targets} == {"sm_80", "sm_90"}
    assert faults_of(recorded, recorded) == []
    found = [used.spilled_bytes for targets in recorded.values() for used in targets.values()]
    assert max(found) <= MAX_SPILLED_BYTES
    assert found.count(0) > 0.9 * len(found)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"spilled_bytes": 8}, "copy on sm_80 spills 8 bytes (limit 0)"),
        ({"shared_bytes": 200_000}, "copy on sm_80 needs 200000 bytes of shared memory (166912)"),
        ({"registers": 256}, "copy on sm_80 needs 256 registers (limit 255)"),
    ],
)
def test_a_kernel_beyond_a_limit_is_reported(change, fault):
    found = {"copy": {"sm_80": replace(USED, **change)}}
    assert faults_of(found, {"copy": {"sm_80": USED}}) == [fault]


def test_a_kernel_that_is_not_recorded_is_reported():
    found = {"copy": {"sm_90": USED}}
    assert faults_of(found, {}) == ["copy on sm_90 is not recorded: run make gpu-kernels"]


def test_every_kernel_is_recorded():
    pytest.importorskip("triton", reason="make test-triton installs it")
    from tools.gpu_kernels.variants import variants

    expected = {
        each.name: {f"sm_{architecture}" for architecture in each.architectures}
        for each in variants()
    }
    assert {name: set(targets) for name, targets in read_report().items()} == expected
