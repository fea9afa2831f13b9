"""Triton's kernels are optional: what holds with and without the package."""

from importlib.util import find_spec

import pytest
import torch

from specdec.kernels.reference import triton_availability as availability
from specdec.kernels.reference.triton_availability import triton_fault

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_kernels_are_tested():
    """Their own tests are collected only where Triton is installed."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed; `make test-triton` installs it and runs its tests")


def test_a_missing_package_is_reported(monkeypatch):
    monkeypatch.setattr(availability, "_is_installed", lambda: False)
    assert triton_fault(CUDA) == "the package triton is not installed"


def test_the_device_decides_where_it_is_installed(monkeypatch):
    monkeypatch.setattr(availability, "_is_installed", lambda: True)
    monkeypatch.setattr(availability, "_is_interpreted", lambda: False)
    assert triton_fault(CUDA) is None
    assert triton_fault(CPU) == "they run on cuda, or with TRITON_INTERPRET=1 on cpu, not on cpu"
    monkeypatch.setattr(availability, "_is_interpreted", lambda: True)
    assert triton_fault(CPU) is None
