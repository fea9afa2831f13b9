"""Choice of the kernels that a model runs on."""

from __future__ import annotations

from enum import StrEnum

import torch

from specdec.config.engine import Kernels
from specdec.kernels.attention import PagedAttention, TorchAttention
from specdec.kernels.cpu import native_library
from specdec.kernels.triton.availability import triton_fault
from specdec.types.errors import InvalidValueError
from specdec.types.sharding import HeadShard


class KernelBackend(StrEnum):
    """The kernels of a model's forward pass, selected once when it is loaded.

    Sampling and shared-memory collectives use the C++ kernels wherever they are available.
    """

    TORCH = "torch"
    CPU = "cpu"
    TRITON = "triton"

    @classmethod
    def select(cls, kernels: Kernels, device: torch.device) -> KernelBackend:
        """Return the backend for a device; compiles the C++ kernels on first use.

        Raises InvalidValueError if `kernels` is "native" or "triton" and they are not available.
        """
        if kernels in ("auto", "native") and device.type == "cpu" and native_library() is not None:
            return cls.CPU
        if kernels == "native":
            limit = f"auto or torch on device {device.type}, or without a C++ compiler"
            raise InvalidValueError("kernels", kernels, limit)
        if kernels == "triton" or (kernels == "auto" and device.type == "cuda"):
            return cls._triton(kernels, device)
        return cls.TORCH

    @classmethod
    def _triton(cls, kernels: Kernels, device: torch.device) -> KernelBackend:
        fault = triton_fault(device)
        if fault is None:
            return cls.TRITON
        if kernels == "triton":
            raise InvalidValueError("kernels", kernels, f"auto or torch: {fault}")
        return cls.TORCH


def paged_attention(
    backend: KernelBackend,
    heads: HeadShard,
    head_dim: int,
    block_size: int,
    device: torch.device,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    uses_torch: bool = False,
) -> PagedAttention:
    """Return the attention of a backend; the native kernels' decoder does not use it.

    uses_torch: whether it is torch's on every backend, as for sinks and latent KV, which Triton's
    kernels do not have. Other arguments as in PagedAttention.
    """
    kind: type[PagedAttention] = TorchAttention
    if backend is KernelBackend.TRITON and not uses_torch:
        from specdec.kernels.triton.attention import TritonAttention  # imports Triton

        kind = TritonAttention
    return kind(heads, head_dim, block_size, device, scale=scale, softcap=softcap)
