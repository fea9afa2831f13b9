"""Availability of Triton's kernels, without importing Triton where they cannot run."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


def has_triton(device: torch.device) -> bool:
    """Return whether Triton is installed and compiles for a device."""
    return device.type == "cuda" and _is_installed()


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
