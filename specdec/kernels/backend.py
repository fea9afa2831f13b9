"""Choice of the kernels that a model runs on."""

from __future__ import annotations

from enum import StrEnum

import torch

from specdec.config.engine import Kernels
from specdec.kernels.cpu import native_library
from specdec.kernels.reference.paged_attention import PagedAttention
from specdec.kernels.reference.recurrent.recurrence import RecurrenceKernels
from specdec.kernels.reference.rows import RowKernels
from specdec.kernels.reference.triton_availability import triton_fault
from specdec.types.errors import InvalidValueError


class KernelBackend(StrEnum):
    """The kernels of a model's forward pass, selected once when it is loaded.

    Operations on rows of logits are selected by the same rule (`specdec.sampling.row_ops`).
    Collectives in shared memory use the C++ kernels wherever they are available.
    """

    TORCH = "torch"
    CPU = "cpu"
    TRITON = "triton"
    INVARIANT = "invariant"
    """Triton, with products and attention whose rows have the same bits in any batch."""

    @property
    def is_triton(self) -> bool:
        """Return whether the kernels are Triton's."""
        return self in (KernelBackend.TRITON, KernelBackend.INVARIANT)

    @classmethod
    def select(
        cls, kernels: Kernels, device: torch.device, *, deterministic: bool = False
    ) -> KernelBackend:
        """Return the backend for a device; compiles the C++ kernels on first use.

        deterministic: whether the bits of a row must not depend on its batch, as they never do in
        the C++ kernels.

        Raises InvalidValueError if `kernels` is "native" or "triton" and they are not available,
        and for `deterministic` with torch's kernels, on which nothing holds the order of sums.
        """
        found = cls._select(kernels, device)
        if not deterministic or found is cls.CPU:
            return found
        if found is cls.TRITON:
            return cls.INVARIANT
        limit = f"False with torch's kernels, which are selected on device {device.type}"
        raise InvalidValueError("deterministic", True, limit)

    @classmethod
    def _select(cls, kernels: Kernels, device: torch.device) -> KernelBackend:
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


def attention_kind(backend: KernelBackend) -> type[PagedAttention]:
    """Return the attention of a backend; the native kernels' decoder does not use it."""
    if not backend.is_triton:
        return PagedAttention
    from specdec.kernels.triton import attention  # imports Triton

    is_invariant = backend is KernelBackend.INVARIANT
    return attention.InvariantAttention if is_invariant else attention.TritonAttention


def row_kernels(backend: KernelBackend) -> RowKernels:
    """Return the row kernels of a backend; the native kernels have their own in C++."""
    if backend.is_triton:
        from specdec.kernels.triton.rows import TritonRowKernels  # imports Triton

        return TritonRowKernels()
    return RowKernels()


def recurrence_kernels(backend: KernelBackend) -> RecurrenceKernels:
    """Return the kernels of recurrent layers; the native kernels have their own in C++."""
    if backend.is_triton:
        from specdec.kernels.triton.recurrence import TritonRecurrence  # imports Triton

        return TritonRecurrence()
    return RecurrenceKernels()
