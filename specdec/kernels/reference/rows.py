"""Kernels of whole rows between two matrix products, in torch: the reference of Triton's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class RowKernels:
    """Kernels that read and write one row of T at a time; a row's bits do not depend on others."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x [..., size], normalized; weight: [size], of the type of x or float32."""
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)

    def add_rms_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return residual + x, and that normalized; all [T, size]."""
        total = residual + x
        return total, self.rms_norm(total, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, [T, size]; gate_up: [T, 2 * size], both side by side."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize x [T, size] per row; return [T, size] in `dtype`, and scales [T] float32.

    dtype: int8, or an 8-bit float type. The scale maps the largest magnitude to the largest value
    of the type, 127 for int8.
    """
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scales = x.float().abs().amax(1).div_(largest).clamp_min_(torch.finfo(torch.float32).tiny)
    exact = x.float() / scales[:, None]
    quantized = exact.round_() if dtype == torch.int8 else exact.clamp_(-largest, largest)
    return quantized.to(dtype), scales
