"""Matrices of 8-bit integers, quantized as they are loaded, and their products in torch.

The native kernels take the same integers (docs/adr/0007).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from specdec.types.errors import UnsupportedModelError

_SMALLEST = torch.finfo(torch.float32).tiny


class Int8Matrix:
    """A matrix of 8-bit integers, multiplied by rows of 16-bit integers.

    Each output has a scale, and each row of `x` one of its own, found as it is multiplied: the
    largest magnitude becomes the largest integer (per-token and per-channel quantization as in
    Dettmers et al. 2022, LLM.int8(), section 2). The integers of a row are two digits of 8 bits,
    which are rows of one product. Sums are exact in int32, so a row's product is the same bits
    whatever other rows are in the batch, which verification relies on. One digit would round
    so coarsely that a last bit from elsewhere in the model, as torch's attention leaves it in
    differently shaped batches, changes what the model says (docs/adr/0007).
    """

    def __init__(self, blocks: Iterable[Tensor], shape: tuple[int, int]) -> None:
        """blocks: consecutive rows of the matrix, quantized one block after the other.

        `shape` is [out_features, in_features].
        """
        self._packed = _pack(blocks, shape)
        # Without VNNI, FBGEMM adds pairs of products in int16, where only 7-bit digits fit.
        self._largest = 127 if torch.cpu._is_vnni_supported() else 63

    def multiply(self, x: Tensor) -> Tensor:
        """x: [T, in_features]; returns [T, out_features] in the same dtype."""
        scales = self._row_scales(x)
        return self._product(x, scales).mul_(scales).to(x.dtype)

    def multiply_add(self, base: Tensor, x: Tensor) -> Tensor:
        """The product plus `base`, which is [out_features] or [T, out_features]."""
        scales = self._row_scales(x)
        return torch.addcmul(base.float(), self._product(x, scales), scales).to(x.dtype)

    def _row_scales(self, x: Tensor) -> Tensor:
        """What 1 in the first digit of a row stands for, [T, 1] in float32, never 0."""
        largest = x.abs().amax(1, keepdim=True).float()
        return largest.div_(self._largest).clamp_min_(_SMALLEST)

    def _product(self, x: Tensor, scales: Tensor) -> Tensor:
        """[T, out_features] in float32, still to be multiplied by the rows' scales [T, 1]."""
        exact = x / scales
        first = exact.round()
        steps = 2 * self._largest  # a remainder is half of 1 at most
        second = exact.sub_(first).mul_(steps)
        high, low = self._multiply_digits(torch.cat([first, second])).split(len(x))
        product: Tensor = high.add_(low, alpha=1 / steps)
        return product

    def _multiply_digits(self, digits: Tensor) -> Tensor:
        """digits: [R, in_features], rounded as they are read; returns [R, out_features]."""
        product: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            digits, 1.0, self._largest + 1, self._packed
        )
        return product


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Integers from -127 to 127 as int8, shaped like `weight` [rows, cols], and scales [rows]."""
    scales = weight.float().abs().amax(1).div_(127).clamp_min_(_SMALLEST)
    return (weight / scales[:, None]).round_().to(torch.int8), scales


def _pack(blocks: Iterable[Tensor], shape: tuple[int, int]) -> torch.ScriptObject:
    """The rows of a matrix of `shape`, quantized, in FBGEMM's layout.

    Raises UnsupportedModelError where torch was built without it.
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
        # torch means to drop tensors of quantized types, and offers no other way to this kernel.
        warnings.filterwarnings("ignore", ".*quantized tensor creation functions", UserWarning)
        tensor = torch._make_per_channel_quantized_tensor(
            values, scales, torch.zeros(shape[0], dtype=torch.int64), 0
        )
    packed: torch.ScriptObject = torch.ops.quantized.linear_prepack(tensor, None)
    return packed


def _has_fbgemm() -> bool:
    return "fbgemm" in torch.backends.quantized.supported_engines
