"""Row kernels on a GPU; `specdec.kernels.reference.rows` is the reference."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from specdec.kernels.reference.rows import RowKernels
from specdec.kernels.triton.device import rows as kernels

_SILU_BLOCK = 1024


class TritonRowKernels(RowKernels):
    """Row kernels in Triton."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See RowKernels; the rows of x may be apart."""
        rows = x.reshape(-1, x.shape[-1])
        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._rms_norm(rows, None, weight, rows, output, eps)
        return output

    def add_rms_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See RowKernels; residual and x are contiguous."""
        assert residual.is_contiguous()
        total, output = torch.empty_like(residual), torch.empty_like(residual)
        self._rms_norm(x, residual, weight, total, output, eps)
        return total, output

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See RowKernels."""
        assert gate_up.stride(1) == 1
        num_tokens, size = len(gate_up), gate_up.shape[1] // 2
        output = gate_up.new_empty(num_tokens, size)
        grid = (num_tokens, triton.cdiv(size, _SILU_BLOCK))
        kernels.silu_mul[grid](
            gate_up, output, gate_up.stride(0), size, BLOCK=_SILU_BLOCK, num_warps=4
        )
        return output

    def _rms_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        total: Tensor,
        output: Tensor,
        eps: float,
    ) -> None:
        assert x.stride(1) == 1
        size = x.shape[1]
        kernels.rms_norm[(len(x),)](
            x,
            x if residual is None else residual,
            weight,
            total,
            output,
            x.stride(0),
            eps,
            SIZE=size,
            BLOCK=triton.next_power_of_2(size),
            ADDS=residual is not None,
            num_warps=warps_of_row(size),
        )


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize x [T, size] per row, as `specdec.kernels.reference.rows.quantize_rows`."""
    assert x.stride(1) == 1
    num_tokens, size = x.shape
    quantized = torch.empty(num_tokens, size, dtype=dtype, device=x.device)
    scales = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
    is_int8 = dtype == torch.int8
    kernels.quantize_row[(num_tokens,)](
        x,
        quantized,
        scales,
        x.stride(0),
        LARGEST=127.0 if is_int8 else torch.finfo(dtype).max,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        ROUNDS=is_int8,
        num_warps=warps_of_row(size),
    )
    return quantized, scales


def warps_of_row(size: int) -> int:
    """Return the warps that process a row of `size` values: 32 values a thread at most, 4 to 16."""
    return min(16, max(4, (1 << (size - 1).bit_length()) // 1024))
