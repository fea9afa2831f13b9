"""Availability of Triton's kernels, without importing Triton where they cannot run."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

_FIRST_WITH_E4M3 = (8, 9)
_HOPPER = 9


def triton_fault(device: torch.device) -> str | None:
    """Return why Triton's kernels cannot run on tensors of a device; None where they can.

    On a CPU they run in Triton's interpreter, which tests use: see docs/gpu-kernels.md.
    """
    if not _is_installed():
        return "the package triton is not installed"
    if device.type == "cuda" or (device.type == "cpu" and _is_interpreted()):
        return None
    return f"they run on cuda, or with TRITON_INTERPRET=1 on cpu, not on {device}"


@cache
def _is_installed() -> bool:
    return find_spec("triton") is not None


def _is_interpreted() -> bool:
    from triton import knobs  # importing Triton takes a second

    return bool(knobs.runtime.interpret)


@cache
def has_tensor_maps(device: torch.device) -> bool:
    """Return whether a GPU copies tiles by the description of a tensor, and has 227 KiB for them.

    An H100 or H200; later GPUs do too, but multiply by instructions that were not tried.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == _HOPPER


def kv_dtype_fault(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why Triton's kernels cannot store KV of a type on a device; None where they can."""
    if device.type != "cuda" or dtype != torch.float8_e4m3fn:
        return None
    found = torch.cuda.get_device_capability(device)
    if found >= _FIRST_WITH_E4M3:
        return None
    return f"this GPU, sm_{found[0]}{found[1]}, does not convert fp8_e4m3, which needs sm_89"
