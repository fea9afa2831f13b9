"""The matrices of linear layers: in which format they are held, and which kernels multiply by them.

A layer gives a matrix its rows as they come from a checkpoint, and asks for products. What is held
is this module's affair, so a quantized layer is divided over ranks like any other.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from specdec.config.engine import Kernels
from specdec.config.quantization import QuantizationMethod
from specdec.kernels.cpu import (
    MatrixFormat,
    MatrixStruct,
    PackedMatrix,
    native_library,
    native_library_fault,
)
from specdec.models.layers.quantization import Int8Matrix, quantize_rows
from specdec.types.errors import InvalidValueError, UnsupportedModelError

_BLOCK_ELEMENTS = 2**24
"""Weights that are read at a time where a whole slice need not be in memory unquantized."""

_FORMATS = {
    (torch.float32, torch.float32): MatrixFormat.FLOAT32,
    (torch.float32, torch.bfloat16): MatrixFormat.SHORT_FLOAT32,
    (torch.float32, torch.float16): MatrixFormat.FLOAT16,
    (torch.bfloat16, torch.bfloat16): MatrixFormat.BFLOAT16,
    (torch.float16, torch.float16): MatrixFormat.FLOAT16,
}
"""By the model's data type, and the one that its weights come in."""

_QUANTIZED_FORMATS: dict[QuantizationMethod, MatrixFormat] = {
    "int8": MatrixFormat.INT8,
    "w8a8": MatrixFormat.W8A8,
}


class Matrix(Protocol):
    """A matrix of shape [out_features, in_features] that rows are multiplied by."""

    def multiply(self, x: Tensor) -> Tensor:
        """x: [T, in_features]; returns [T, out_features] in the same dtype."""
        ...

    def multiply_add(self, base: Tensor, x: Tensor) -> Tensor:
        """The product plus `base`, which is [out_features] or [T, out_features]."""
        ...


class FullMatrix:
    """A matrix in the model's dtype, stored transposed, for torch (docs/adr/0003).

    weight: [in_features, out_features].
    """

    def __init__(
        self, blocks: Iterable[Tensor], shape: tuple[int, int], dtype: torch.dtype
    ) -> None:
        """blocks: as `make_matrix` says; where they are is where the matrix will be.

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


class NativeMatrix:
    """A matrix for the native kernels: packed, in 8-bit integers or in the model's dtype.

    Weights of a float32 model that come in 16 bits stay so, and products are the same bits as if
    they took 32.

    Whatever the format, activations and sums are float32, and a row's product is the same bits
    alone and in any batch. A product rounds its input where the format does: to bfloat16, or to
    8-bit digits.
    """

    def __init__(
        self,
        blocks: Iterable[Tensor],
        shape: tuple[int, int],
        dtype: torch.dtype,
        quantization: QuantizationMethod | None,
        library: ctypes.CDLL,
    ) -> None:
        """blocks: as `make_matrix` says; each is quantized and packed before the next."""
        self.is_quantized = quantization is not None
        self._dtype = dtype
        pieces = iter(blocks)
        first = next(pieces)
        weights = (
            _float_format(dtype, first.dtype, shape[1])
            if quantization is None
            else _QUANTIZED_FORMATS[quantization]
        )
        self._packed = PackedMatrix(library, weights, shape)
        end = 0
        for block in chain([first], pieces):
            start, end = end, end + len(block)
            if quantization is None:
                self._packed.pack(start, block.to(self._packed.dtype))
            else:
                self._packed.pack(start, *quantize_rows(block))
        assert end == shape[0], "rows are missing"

    @property
    def native(self) -> MatrixStruct:
        """What the kernels in C++ take; valid as long as this matrix is."""
        return self._packed.struct

    def rows(self, indices: Tensor) -> Tensor:
        """The rows at `indices` [R] int64, as they came in; not of a quantized matrix."""
        return self._packed.rows(indices).to(self._dtype)

    def multiply(self, x: Tensor) -> Tensor:
        """See Matrix."""
        result = torch.empty(len(x), self._packed.shape[0], device="cpu")
        self._packed.multiply(_rows_of_floats(x), result)
        return result.to(x.dtype)

    def multiply_add(self, base: Tensor, x: Tensor) -> Tensor:
        """See Matrix."""
        result = torch.empty(len(x), self._packed.shape[0], device="cpu").copy_(base)
        self._packed.multiply(_rows_of_floats(x), result, adds=True)
        return result.to(x.dtype)


def make_matrix(
    blocks: Iterable[Tensor],
    shape: tuple[int, int],
    dtype: torch.dtype,
    *,
    quantization: QuantizationMethod | None = None,
    kernels: Kernels = "auto",
    device: torch.device,
) -> Matrix:
    """A matrix of `shape` [out_features, in_features] from consecutive rows of it on `device`.

    blocks: of some rows each, at least one; all in `dtype`, or all in one that it only widens.
    Raises InvalidValueError where `kernels` is "native" and they cannot be had, and
    UnsupportedModelError where `quantization` is "w8a8", which is theirs alone, and they are not
    taken.
    """
    if library := _library(kernels, device):
        return NativeMatrix(blocks, shape, dtype, quantization, library)
    match quantization:
        case None:
            return FullMatrix(blocks, shape, dtype)
        case "int8":
            return Int8Matrix(blocks, shape)
        case "w8a8":
            fault = native_library_fault() or "not every rank has them, or kernels is torch"
            raise UnsupportedModelError(f"quantization w8a8 needs native kernels: {fault}")


def row_blocks(rows: range, in_features: int) -> list[range]:
    """`rows` in pieces small enough to be held unquantized."""
    step = max(1, _BLOCK_ELEMENTS // in_features)
    return [range(start, min(start + step, rows.stop)) for start in rows[::step]]


def _float_format(dtype: torch.dtype, stored: torch.dtype, in_features: int) -> MatrixFormat:
    weights = _FORMATS[dtype, stored]
    if weights == MatrixFormat.SHORT_FLOAT32 and in_features % 2 == 1:
        return MatrixFormat.FLOAT32
    return weights


def _library(kernels: Kernels, device: torch.device) -> ctypes.CDLL | None:
    """The native kernels, where they are to be used."""
    library = native_library() if kernels != "torch" and device.type == "cpu" else None
    if kernels == "native" and library is None:
        limit = f"auto or torch where device is {device.type} or nothing compiles C++"
        raise InvalidValueError("kernels", kernels, limit)
    return library


def _rows_of_floats(x: Tensor) -> Tensor:
    """The rows of x, [T, in_features], in float32 and each of them contiguous."""
    x = x.float()
    return x if x.stride(-1) == 1 else x.contiguous()
