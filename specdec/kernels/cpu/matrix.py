"""Packed matrices for GEMM with few rows: Python bindings of matrix.cpp and pack.cpp."""

from __future__ import annotations

import ctypes
from ctypes import c_bool, c_int32
from enum import IntEnum

import torch
from torch import Tensor

from specdec.kernels.cpu.build import declare
from specdec.kernels.cpu.large_memory import huge_page_allocator

_Address = ctypes.c_void_p
_Int = ctypes.c_int64


PANEL_OUTPUTS = 16
"""Outputs of a panel; `kPanelOutputs` in packed_layout.h."""


class MatrixFormat(IntEnum):
    """Storage format of the weights; the values of `Format` in matrix.h.

    SHORT_FLOAT32 is float32 whose lower 16 bits are zero and not stored.
    """

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    INT8 = 3
    W8A8 = 4
    SHORT_FLOAT32 = 5


_DTYPES = {
    MatrixFormat.FLOAT32: torch.float32,
    MatrixFormat.BFLOAT16: torch.bfloat16,
    MatrixFormat.FLOAT16: torch.float16,
    MatrixFormat.INT8: torch.int8,
    MatrixFormat.W8A8: torch.int8,
    MatrixFormat.SHORT_FLOAT32: torch.bfloat16,
}


FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Data types of embeddings, KV and inputs of recurrences; the values of `Format` in matrix.h."""


class MatrixStruct(ctypes.Structure):
    """`Matrix` in matrix.h. Its creator owns the memory that it points to."""

    _fields_ = (
        ("format", ctypes.c_int32),
        ("out_features", _Int),
        ("in_features", _Int),
        ("packed", _Address),
        ("scales", _Address),
        ("bias", _Address),
    )


class PackedMatrix:
    """A matrix [out_features, in_features] in the packed layout, filled by `pack`.

    Each output is one sum in a fixed order, so a row's result is the same bits alone, in any batch
    and with any number of threads. Sums are in float32, over blocks of 1024 inputs that are then
    added; BFLOAT16 rounds activations to bfloat16 first. 8-bit weights use int32 sums of quantized
    activations (docs/adr/0007), in W8A8 per group of inputs.
    """

    def __init__(self, library: ctypes.CDLL, weights: MatrixFormat, shape: tuple[int, int]) -> None:
        """Allocate the matrix, filled with zeros.

        shape: (out_features, in_features).
        """
        assert weights != MatrixFormat.SHORT_FLOAT32 or shape[1] % 2 == 0
        matrix = ctypes.POINTER(MatrixStruct)
        declare(
            library,
            packed_bytes=(_Int, matrix),
            pack_rows=(None, matrix, _Address, _Int, _Int, c_int32),
            gather_rows=(c_bool, matrix, _Address, _Int, _Address),
            gemm=(c_bool, matrix, _Address, _Int, _Int, _Address, _Int, c_bool, c_int32),
        )
        self.dtype = _DTYPES[weights]
        self.shape = shape
        self._library = library
        self._scales = torch.zeros(shape[0], device="cpu") if self.dtype == torch.int8 else None
        scales = None if self._scales is None else self._scales.data_ptr()
        self.struct = MatrixStruct(weights, *shape, None, scales, None)
        self._packed_weights = huge_page_allocator().allocate(
            library.specdec_packed_bytes(self.struct)
        )
        self.struct.packed = self._packed_weights.data_ptr()

    def pack(self, first: int, rows: Tensor, scales: Tensor | None = None) -> None:
        """Pack consecutive rows, from row `first` on.

        rows: [R, in_features] in `dtype`; scales: [R] float32, for 8-bit formats only.
        """
        assert rows.dtype == self.dtype
        assert rows.shape[1:] == self.shape[1:]
        assert first + len(rows) <= self.shape[0]
        rows = rows.contiguous()
        self._library.specdec_pack_rows(
            self.struct, rows.data_ptr(), first, len(rows), torch.get_num_threads()
        )
        if self._scales is not None:
            assert scales is not None
            self._scales[first : first + len(rows)] = scales

    def multiply(self, x: Tensor, y: Tensor, *, adds: bool = False) -> None:
        """Compute y = x W^T, or y += x W^T if `adds`.

        x: [R, in_features], y: [R, out_features], both float32 with contiguous rows. Raises
        MemoryError when no scratch memory is available.
        """
        assert x.dtype == y.dtype == torch.float32
        assert x.stride(-1) == y.stride(-1) == 1
        assert x.shape[1] == self.shape[1]
        assert y.shape == (len(x), self.shape[0])
        is_done = self._library.specdec_gemm(
            self.struct,
            x.data_ptr(),
            x.stride(0),
            len(x),
            y.data_ptr(),
            y.stride(0),
            adds,
            torch.get_num_threads(),
        )
        if not is_done:
            raise MemoryError(f"no memory to multiply {len(x)} rows")

    def rows(self, indices: Tensor) -> Tensor:
        """Return rows [R, in_features] as they were packed; not for 8-bit formats.

        indices: [R] int64. Raises IndexError for an index out of range.
        """
        assert self._scales is None
        assert indices.dtype == torch.int64
        indices = indices.contiguous()
        rows = torch.empty(len(indices), self.shape[1], dtype=self.dtype, device="cpu")
        if not self._library.specdec_gather_rows(
            self.struct, indices.data_ptr(), len(indices), rows.data_ptr()
        ):
            raise IndexError(f"row index out of range: it must be from 0 to {self.shape[0] - 1}")
        return rows
