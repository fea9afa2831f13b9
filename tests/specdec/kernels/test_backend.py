"""Selection of the kernel backend."""

import pytest
import torch

from specdec.kernels import backend
from specdec.kernels.backend import KernelBackend
from specdec.types.errors import InvalidValueError

CPU, META = torch.device("cpu"), torch.device("meta")


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
