"""Weight matrices of linear layers: their storage format, and the kernels that multiply by them.

A layer passes rows of the checkpoint, and calls multiply. Layers do not depend on the storage
format, so a quantized layer is sharded like any other.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from specdec.config.quantization import (
    GPU_QUANTIZATION_METHODS,
    INT4_GROUP,
    QuantizationMethod,
)
from specdec.kernels.backend import KernelBackend
from specdec.kernels.cpu import (
    MatrixFormat,
    MatrixStruct,
    PackedMatrix,
    native_library,
    native_library_fault,
)
from specdec.kernels.reference.packed_weight import (
    CODES_PER_WORD,
    CodeKind,
    joined,
    quantize_weight,
)
from specdec.models.layers.quantized_matrix import QuantizedMatrix
from specdec.types.errors import UnsupportedModelError

_SMALLEST = torch.finfo(torch.float32).tiny

_BLOCK_ELEMENTS = 2**24
"""Weights per block, so that a shard is never in memory as a whole before quantization."""

_FORMATS = {
    (torch.float32, torch.float32): MatrixFormat.FLOAT32,
    (torch.float32, torch.bfloat16): MatrixFormat.SHORT_FLOAT32,
    (torch.float32, torch.float16): MatrixFormat.FLOAT16,
    (torch.bfloat16, torch.bfloat16): MatrixFormat.BFLOAT16,
    (torch.float16, torch.float16): MatrixFormat.FLOAT16,
}
"""Format by the dtypes of the model and of its checkpoint."""

_QUANTIZED_FORMATS: dict[QuantizationMethod, MatrixFormat] = {
    "int8": MatrixFormat.INT8,
    "w8a8": MatrixFormat.W8A8,
}


class Matrix(Protocol):
    """Weight matrix [out_features, in_features] of a linear layer."""

    def multiply(self, x: Tensor) -> Tensor:
        """Return x W^T, [T, out_features] in the dtype of x; x: [T, in_features]."""
        ...

    def multiply_add(self, base: Tensor, x: Tensor) -> Tensor:
        """Return base + x W^T; base: [out_features] or [T, out_features]."""
        ...

    def multiply_to_float32(self, x: Tensor) -> Tensor:
        """Return x W^T in float32, without rounding it to the dtype of x first."""
        ...


class FullMatrix:
    """Matrix for torch in the model's dtype, stored transposed on CPUs (docs/adr/0003).

    weight: [in_features, out_features]. On a GPU it is a view of rows [out_features, in_features],
    the layout that the libraries of GPUs read along both operands.

    overwrites_base: whether multiply_add may return its result in a base of all rows, which saves
    a copy of them.
    """

    overwrites_base = False

    def __init__(
        self, blocks: Iterable[Tensor], shape: tuple[int, int], dtype: torch.dtype
    ) -> None:
        """Copy the blocks; see `make_matrix`. The matrix is on the device of the blocks.

        shape: (out_features, in_features).
        """
        out_features, in_features = shape
        pieces = iter(blocks)
        first = next(pieces)
        size = (out_features, in_features) if first.is_cuda else (in_features, out_features)
        weight = torch.empty(size, dtype=dtype, device=first.device)
        self.weight = weight.t() if first.is_cuda else weight
        for place, block in _placed(chain([first], pieces), out_features):
            self.weight[:, place] = block.t()

    def multiply(self, x: Tensor) -> Tensor:
        """See Matrix."""
        return x @ self.weight

    def multiply_add(self, base: Tensor, x: Tensor) -> Tensor:
        """See Matrix."""
        if self.overwrites_base and base.shape == (len(x), self.weight.shape[1]):
            return base.addmm_(x, self.weight)
        return torch.addmm(base, x, self.weight)

    def multiply_to_float32(self, x: Tensor) -> Tensor:
        """See Matrix."""
        if x.dtype == torch.float32:
            return x @ self.weight
        if x.is_cuda:
            return torch.mm(x, self.weight, out_dtype=torch.float32)
        # On CPUs torch has no product of 16-bit matrices with a float32 result.
        step = max(1, _BLOCK_ELEMENTS // len(self.weight))
        return torch.cat([x.float() @ part.float() for part in self.weight.split(step, dim=1)], 1)


class InvariantMatrix(FullMatrix):
    """A FullMatrix whose products have the same bits for a row in any batch."""

    def multiply(self, x: Tensor) -> Tensor:
        """See Matrix."""
        return self._product(x, None)

    def multiply_add(self, base: Tensor, x: Tensor) -> Tensor:
        """See Matrix."""
        overwrites = self.overwrites_base and base.shape == (len(x), self.weight.shape[1])
        return self._product(x, base, base if overwrites else None)

    def multiply_to_float32(self, x: Tensor) -> Tensor:
        """See Matrix."""
        size = (len(x), self.weight.shape[1])
        return self._product(x, None, x.new_empty(size, dtype=torch.float32))

    def _product(self, x: Tensor, base: Tensor | None, output: Tensor | None = None) -> Tensor:
        from specdec.kernels.triton.products import multiply  # imports Triton

        rows = x if x.stride(1) == 1 else x.contiguous()
        return multiply(rows, self.weight.t(), base, output)


class Int8Matrix:
    """Int8 weights for torch, by activations that are quantized to a hi and a lo int8 part.

    Weights have a scale per output channel; activations have a scale per token, computed at run
    time, that maps the largest magnitude to the largest integer (Dettmers et al. 2022, LLM.int8(),
    section 2). The native kernels use the same integers (docs/adr/0007). The hi and lo parts are
    rows of one int8 GEMM. Its int32 sums are exact, so a row's result is the same bits in any
    batch, which verification relies on. With the hi part only, the last bits of torch's attention,
    which depend on the batch shape, would change output tokens.
    """

    def __init__(self, blocks: Iterable[Tensor], shape: tuple[int, int]) -> None:
        """Quantize consecutive blocks of rows one by one; shape: (out_features, in_features)."""
        self._packed = _pack(blocks, shape)
        # Without VNNI, FBGEMM adds pairs of products in int16, which fits 7-bit activations only.
        self._largest = 127 if torch.cpu._is_vnni_supported() else 63

    def multiply(self, x: Tensor) -> Tensor:
        """See Matrix."""
        return self.multiply_to_float32(x).to(x.dtype)

    def multiply_add(self, base: Tensor, x: Tensor) -> Tensor:
        """See Matrix."""
        scales = self._row_scales(x)
        return torch.addcmul(base.float(), self._product(x, scales), scales).to(x.dtype)

    def multiply_to_float32(self, x: Tensor) -> Tensor:
        """See Matrix."""
        scales = self._row_scales(x)
        return self._product(x, scales).mul_(scales)

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
    for place, block in _placed(blocks, shape[0]):
        values[place], scales[place] = quantize_rows(block)
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


class NativeMatrix:
    """Packed matrix for the native kernels, in int8 or in the model's dtype.

    16-bit weights of a float32 model stay in 16 bits; results are the same bits as with 32.

    Inputs and outputs are float32, and a row's result is the same bits alone and in any batch.
    Formats with narrow inputs quantize the activations, to bfloat16 or int8.
    """

    def __init__(
        self,
        blocks: Iterable[Tensor],
        shape: tuple[int, int],
        dtype: torch.dtype,
        quantization: QuantizationMethod | None,
        library: ctypes.CDLL,
    ) -> None:
        """Quantize and pack the blocks one by one; see `make_matrix`."""
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
        for place, block in _placed(chain([first], pieces), shape[0]):
            if quantization is None:
                self._packed.pack(place.start, block.to(self._packed.dtype))
            else:
                self._packed.pack(place.start, *quantize_rows(block))

    @property
    def native(self) -> MatrixStruct:
        """Return the argument of C++ kernels; valid for the lifetime of this matrix."""
        return self._packed.struct

    def rows(self, indices: Tensor) -> Tensor:
        """Return the unpacked rows [R, in_features] of indices [R] int64; not if quantized."""
        return self._packed.rows(indices).to(self._dtype)

    def multiply(self, x: Tensor) -> Tensor:
        """See Matrix."""
        return self.multiply_to_float32(x).to(x.dtype)

    def multiply_to_float32(self, x: Tensor) -> Tensor:
        """See Matrix."""
        result = torch.empty(len(x), self._packed.shape[0], device="cpu")
        self._packed.multiply(_rows_of_floats(x), result)
        return result

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
    backend: KernelBackend,
) -> Matrix:
    """Return a matrix of `shape` (out_features, in_features) from consecutive blocks of rows.

    blocks: at least one; all in `dtype`, or all in a dtype that converts to it without loss. Raises
    UnsupportedModelError for a `quantization` that the backend does not support.
    """
    if quantization is not None and backend.is_triton:
        return _packed_matrix(blocks, quantization, backend)
    if backend is KernelBackend.CPU:
        library = native_library()
        assert library is not None, "the backend was selected without its library"
        return NativeMatrix(blocks, shape, dtype, quantization, library)
    match quantization:
        case None:
            kind = InvariantMatrix if backend is KernelBackend.INVARIANT else FullMatrix
            return kind(blocks, shape, dtype)
        case "int8":
            return Int8Matrix(blocks, shape)
        case "w8a8":
            fault = native_library_fault() or "not every rank has them, or kernels is torch"
            raise UnsupportedModelError(f"quantization w8a8 needs native kernels: {fault}")
        case "int4":
            raise UnsupportedModelError("quantization int4 needs Triton's kernels on a GPU")


def _packed_matrix(
    blocks: Iterable[Tensor], quantization: QuantizationMethod, backend: KernelBackend
) -> Matrix:
    """Quantize blocks of rows one by one, for Triton's kernels.

    Raises UnsupportedModelError for a method without one, and for inputs that 4-bit codes do not
    fill.
    """
    if quantization not in GPU_QUANTIZATION_METHODS:
        raise UnsupportedModelError(f"quantization {quantization} runs on a CPU")
    is_int4 = quantization == "int4"
    kind, group = (CodeKind.INT4, INT4_GROUP) if is_int4 else (CodeKind.INT8, None)
    parts = []
    for block in blocks:
        if is_int4 and block.shape[1] % CODES_PER_WORD:
            limit = f"a multiple of {CODES_PER_WORD}"
            raise UnsupportedModelError(
                f"quantization int4 needs layers whose inputs are {limit}, not {block.shape[1]}"
            )
        parts.append(quantize_weight(block, kind, group))
    weight = joined(parts)
    assert weight is not None, "blocks of one matrix differ"
    return QuantizedMatrix(weight, is_invariant=backend is KernelBackend.INVARIANT)


def row_blocks(rows: range, in_features: int) -> list[range]:
    """Split `rows` into blocks small enough to hold in memory unquantized."""
    step = max(1, _BLOCK_ELEMENTS // in_features)
    return [range(start, min(start + step, rows.stop)) for start in rows[::step]]


def _placed(blocks: Iterable[Tensor], num_rows: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield consecutive blocks of rows with their places in a matrix of `num_rows` rows."""
    end = 0
    for block in blocks:
        start, end = end, end + len(block)
        yield slice(start, end), block
    assert end == num_rows, "rows are missing"


def _float_format(dtype: torch.dtype, stored: torch.dtype, in_features: int) -> MatrixFormat:
    weights = _FORMATS[dtype, stored]
    if weights == MatrixFormat.SHORT_FLOAT32 and in_features % 2 == 1:
        return MatrixFormat.FLOAT32
    return weights


def _rows_of_floats(x: Tensor) -> Tensor:
    """Return x [T, in_features] in float32 with contiguous rows."""
    x = x.float()
    return x if x.stride(-1) == 1 else x.contiguous()
