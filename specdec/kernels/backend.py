"""Choice of the kernels that a model runs on."""

from __future__ import annotations

from enum import StrEnum

import torch

from specdec.config.engine import Kernels
from specdec.kernels.cpu import native_library
from specdec.types.errors import InvalidValueError


class KernelBackend(StrEnum):
    """The kernels of a model's forward pass, selected once when it is loaded.

    Sampling and shared-memory collectives use the C++ kernels wherever they are available.
    """

    TORCH = "torch"
    CPU = "cpu"

    @classmethod
    def select(cls, kernels: Kernels, device: torch.device) -> KernelBackend:
        """Return the backend for a device; compiles the C++ kernels on first use.

        Raises InvalidValueError if `kernels` is "native" and the kernels are not available.
        """
        if kernels != "torch" and device.type == "cpu" and native_library() is not None:
            return cls.CPU
        if kernels == "native":
            limit = f"auto or torch on device {device.type}, or without a C++ compiler"
            raise InvalidValueError("kernels", kernels, limit)
        return cls.TORCH
