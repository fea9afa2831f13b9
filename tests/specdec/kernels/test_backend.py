"""Selection of the kernel backend."""

import pytest
import torch

from specdec.kernels import backend
from specdec.kernels.backend import KernelBackend
from specdec.types.errors import InvalidValueError

CPU, CUDA, META = (torch.device(name) for name in ("cpu", "cuda", "meta"))


@pytest.mark.parametrize(
    ("kernels", "device", "has_library", "expected"),
    [
        ("auto", CPU, True, KernelBackend.CPU),
        ("native", CPU, True, KernelBackend.CPU),
        ("torch", CPU, True, KernelBackend.TORCH),
        ("auto", CPU, False, KernelBackend.TORCH),
        ("auto", META, True, KernelBackend.TORCH),
    ],
)
def test_selection(monkeypatch, kernels, device, has_library, expected):
    monkeypatch.setattr(backend, "native_library", lambda: object() if has_library else None)
    assert KernelBackend.select(kernels, device) is expected


@pytest.mark.parametrize(("device", "has_library"), [(CPU, False), (META, True)])
def test_native_is_rejected_where_it_is_not_available(monkeypatch, device, has_library):
    monkeypatch.setattr(backend, "native_library", lambda: object() if has_library else None)
    with pytest.raises(InvalidValueError, match="kernels is 'native'; it must be auto or torch"):
        KernelBackend.select("native", device)


@pytest.mark.parametrize(
    ("kernels", "device", "fault", "expected"),
    [
        ("auto", CUDA, None, KernelBackend.TRITON),
        ("auto", CUDA, "missing", KernelBackend.TORCH),
        ("torch", CUDA, None, KernelBackend.TORCH),
        ("triton", CUDA, None, KernelBackend.TRITON),
        ("triton", CPU, None, KernelBackend.TRITON),
        ("auto", CPU, None, KernelBackend.CPU),
    ],
)
def test_triton_is_selected_on_gpus_or_by_name(monkeypatch, kernels, device, fault, expected):
    monkeypatch.setattr(backend, "native_library", lambda: object())
    monkeypatch.setattr(backend, "triton_fault", lambda device: fault)
    assert KernelBackend.select(kernels, device) is expected


def test_triton_is_rejected_with_the_reason(monkeypatch):
    monkeypatch.setattr(backend, "triton_fault", lambda device: "no package")
    with pytest.raises(InvalidValueError, match="must be auto or torch: no package"):
        KernelBackend.select("triton", CUDA)
