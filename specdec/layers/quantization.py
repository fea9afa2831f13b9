"""The matrices of linear layers: in the model's dtype, or as 8-bit integers (docs/adr/0007).

A layer gives a matrix its rows as they come from a checkpoint, and asks for products. What is held
is this module's affair, so a quantized layer is divided over ranks like any other.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from specdec.config import QuantizationMethod

_BLOCK_ELEMENTS = 2**24
"""Weights that are read at a time where a whole slice need not be in memory unquantized."""

_SMALLEST = torch.finfo(torch.float32).tiny


class Matrix(Protocol):
    """A matrix of shape [out_features, in_features] that rows are multiplied by."""

    def multiply(self, x: Tensor) -> Tensor:
        """x: [T, in_features]; returns [T, out_features] in the same dtype."""
        ...

    def multiply_add(self, base: Tensor, x: Tensor) -> Tensor:
        """The product plus `base`, which is [out_features] or [T, out_features]."""
        ...


class FullMatrix:
    """A matrix in the model's dtype, stored transposed (docs/adr/0003).

    weight: [in_features, out_features].
    """

    def __init__(
        self, blocks: Iterable[Tensor], shape: tuple[int, int], dtype: torch.dtype
    ) -> None:
        """blocks: consecutive rows of the matrix, at least one block, on the device that is to be.

        `shape` is [out_features, in_features].
        """
        out_features, in_features = shape
        pieces = iter(blocks)
        first = next(pieces)
        self.weight = torch.empty(in_features, out_features, dtype=dtype, device=first.device)
        end = 0
        for block in chain([first], pieces):
            start, end = end, end + len(block)
            self.weight[:, start:end] = block.t()
        assert end == out_features, "rows are missing"

    def multiply(self, x: Tensor) -> Tensor:
        """See Matrix."""
        return x @ self.weight

    def multiply_add(self, base: Tensor, x: Tensor) -> Tensor:
        """See Matrix."""
        return torch.addmm(base, x, self.weight)


class Int8Matrix:
    """A matrix of 8-bit integers, multiplied by rows of 16-bit integers.

    Each output has a scale, and each row of `x` one of its own, found as it is multiplied: the
    largest magnitude becomes the largest integer (per-token and per-channel quantization as in
    Dettmers et al. 2022, LLM.int8(), section 2). The integers of a row are two digits of 8 bits,
    which are rows of one product. Sums are exact in int32, so a row's product is the same bits
    whatever other rows are in the batch, which verification relies on. One digit would round
    so coarsely that a last bit from elsewhere in the model, as differently shaped attention leaves
    it, changes what the model says (docs/adr/0007).
    """

    def __init__(self, blocks: Iterable[Tensor], shape: tuple[int, int]) -> None:
        """Takes what FullMatrix takes, and quantizes one block after the other."""
        self._packed = _pack(blocks, shape)
        # Without VNNI, FBGEMM adds pairs of products in int16, where only 7-bit digits fit.
        self._largest = 127 if torch.cpu._is_vnni_supported() else 63

    def multiply(self, x: Tensor) -> Tensor:
        """See Matrix."""
        scales = self._row_scales(x)
        return self._product(x, scales).mul_(scales).to(x.dtype)

    def multiply_add(self, base: Tensor, x: Tensor) -> Tensor:
        """See Matrix."""
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


class CoarseInt8Matrix(Int8Matrix):
    """The same with rows of 8-bit integers: one digit, half the work, and for drafts alone."""

    def _product(self, x: Tensor, scales: Tensor) -> Tensor:
        return self._multiply_digits(x / scales)


def make_matrix(
    quantization: QuantizationMethod | None,
    blocks: Iterable[Tensor],
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> Matrix:
    """A matrix of `shape` [out_features, in_features] from consecutive rows of it."""
    match quantization:
        case None:
            return FullMatrix(blocks, shape, dtype)
        case "int8":
            return Int8Matrix(blocks, shape)
        case "w8a8":
            return CoarseInt8Matrix(blocks, shape)


def row_blocks(rows: range, in_features: int) -> list[range]:
    """`rows` in pieces small enough to be held unquantized."""
    step = max(1, _BLOCK_ELEMENTS // in_features)
    return [range(start, min(start + step, rows.stop)) for start in rows[::step]]


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Integers from -127 to 127 as int8, shaped like `weight` [rows, cols], and scales [rows]."""
    scales = weight.float().abs().amax(1).div_(127).clamp_min_(_SMALLEST)
    return (weight / scales[:, None]).round_().to(torch.int8), scales


def _pack(blocks: Iterable[Tensor], shape: tuple[int, int]) -> torch.ScriptObject:
    """The rows of a matrix of `shape`, quantized, in FBGEMM's layout."""
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
