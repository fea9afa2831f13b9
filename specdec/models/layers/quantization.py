"""Int8 weight quantization at load time, and its matrix multiplication in torch.

The native kernels use the same integers (docs/adr/0007).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from specdec.types.errors import UnsupportedModelError

_SMALLEST = torch.finfo(torch.float32).tiny


class Int8Matrix:
    """Int8 weights, multiplied by activations that are quantized to a hi and a lo int8 part.

    Weights have a scale per output channel; activations have a scale per token, computed at run
    time, that maps the largest magnitude to the largest integer (Dettmers et al. 2022, LLM.int8(),
    section 2). The hi and lo parts are rows of one int8 GEMM. Its int32 sums are exact, so a row's
    result is the same bits in any batch, which verification relies on. With the hi part only, the
    last bits of torch's attention, which depend on the batch shape, would change output tokens
    (docs/adr/0007).
    """

    def __init__(self, blocks: Iterable[Tensor], shape: tuple[int, int]) -> None:
        """Quantize consecutive blocks of rows one by one; shape: (out_features, in_features)."""
        self._packed = _pack(blocks, shape)
        # Without VNNI, FBGEMM adds pairs of products in int16, which fits 7-bit activations only.
        self._largest = 127 if torch.cpu._is_vnni_supported() else 63

    def multiply(self, x: Tensor) -> Tensor:
        """Return x W^T, [T, out_features] in the dtype of x; x: [T, in_features]."""
        scales = self._row_scales(x)
        return self._product(x, scales).mul_(scales).to(x.dtype)

    def multiply_add(self, base: Tensor, x: Tensor) -> Tensor:
        """Return base + x W^T; base: [out_features] or [T, out_features]."""
        scales = self._row_scales(x)
        return torch.addcmul(base.float(), self._product(x, scales), scales).to(x.dtype)

    def _row_scales(self, x: Tensor) -> Tensor:
        """Return the value of 1 in the hi part of each row, [T, 1] float32, never 0."""
        largest = x.abs().amax(1, keepdim=True).float()
        return largest.div_(self._largest).clamp_min_(_SMALLEST)

    def _product(self, x: Tensor, scales: Tensor) -> Tensor:
        """Return x W^T / scales, [T, out_features] float32; scales: [T, 1]."""
        exact = x / scales
        hi = exact.round()
        steps = 2 * self._largest  # the rounding error is at most 1/2
        lo = exact.sub_(hi).mul_(steps)
        hi_product, lo_product = self._multiply_int8(torch.cat([hi, lo])).split(len(x))
        product: Tensor = hi_product.add_(lo_product, alpha=1 / steps)
        return product

    def _multiply_int8(self, values: Tensor) -> Tensor:
        """Return [R, out_features]; values: [R, in_features], rounded by the operator."""
        product: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            values, 1.0, self._largest + 1, self._packed
        )
        return product


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize weight [rows, cols] per row; return int8 in [-127, 127] and scales [rows]."""
    scales = weight.float().abs().amax(1).div_(127).clamp_min_(_SMALLEST)
    return (weight / scales[:, None]).round_().to(torch.int8), scales


def _pack(blocks: Iterable[Tensor], shape: tuple[int, int]) -> torch.ScriptObject:
    """Return the quantized rows of a matrix of `shape` in FBGEMM's packed layout.

    Raises UnsupportedModelError where torch was built without FBGEMM.
    """
    if not _has_fbgemm():
        raise UnsupportedModelError(
            "quantization int8 needs native kernels, or FBGEMM, which this build of torch lacks"
        )
    values = torch.empty(shape, dtype=torch.int8)
    scales = torch.empty(shape[0], dtype=torch.float64)
    end = 0
    for block in blocks:
        start, end = end, end + len(block)
        values[start:end], scales[start:end] = quantize_rows(block)
    assert end == shape[0], "rows are missing"
    with warnings.catch_warnings():
        # torch deprecates quantized tensors, but this kernel accepts nothing else.
        warnings.filterwarnings("ignore", ".*quantized tensor creation functions", UserWarning)
        tensor = torch._make_per_channel_quantized_tensor(
            values, scales, torch.zeros(shape[0], dtype=torch.int64), 0
        )
    packed: torch.ScriptObject = torch.ops.quantized.linear_prepack(tensor, None)
    return packed


def _has_fbgemm() -> bool:
    return "fbgemm" in torch.backends.quantized.supported_engines
