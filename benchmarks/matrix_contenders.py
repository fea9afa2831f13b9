"""Implementations of matrix products with few rows on a CPU: this project's and torch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.config.engine import Kernels
from specdec.config.quantization import QuantizationMethod
from specdec.kernels.backend import KernelBackend
from specdec.models.layers.matrix import make_matrix

Shape = tuple[int, int]
Product = Callable[[Tensor], object]

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Pass:
    """Prepared product of some rows with all matrices. weight_bytes: bytes that a pass reads."""

    run: Callable[[], None]
    weight_bytes: int


Contender = Callable[[Sequence[Shape], int], Pass]
"""Factory of a pass, from the matrix shapes and the number of rows."""


def _pass(
    product_of: Callable[[Tensor, int], Product],
    bytes_a_weight: int,
    dtype: torch.dtype,
    shapes: Sequence[Shape],
    rows: int,
) -> Pass:
    """Prepare a pass. product_of: makes a product from a weight [out, in] and a row count."""
    products = [(product_of(torch.randn(shape).mul_(0.02), rows), shape[1]) for shape in shapes]
    inputs = {size: torch.randn(rows, size).to(dtype) for _, size in shapes}

    def run() -> None:
        for product, size in products:
            product(inputs[size])

    return Pass(run, bytes_a_weight * sum(out * size for out, size in shapes))


def _ours(
    kernels: Kernels,
    dtype: torch.dtype,
    quantization: QuantizationMethod | None,
    weight: Tensor,
    _rows: int,
    stored: torch.dtype | None = None,
) -> Product:
    """Return the product of a layer's matrix. stored: the checkpoint dtype if it is not `dtype`."""
    return make_matrix(
        [weight.to(stored or dtype)],
        (weight.shape[0], weight.shape[1]),
        dtype,
        quantization=quantization,
        backend=KernelBackend.select(kernels, CPU),
    ).multiply


def _linear(dtype: torch.dtype, weight: Tensor, _rows: int) -> Product:
    converted = weight.to(dtype)
    return lambda x: F.linear(x, converted)


def _mkl_packed(weight: Tensor, rows: int) -> Product:
    operators: Any = torch.ops.mkl
    packed = operators._mkl_reorder_linear_weight(weight, rows)
    return lambda x: operators._mkl_linear(x, packed, weight, None, rows)


def _onednn_packed(weight: Tensor, rows: int) -> Product:
    operators: Any = torch.ops.mkldnn
    packed = operators._reorder_linear_weight(weight, rows)
    return lambda x: operators._linear_pointwise(x, packed, None, "none", [], "")


def _int8_by_batch(weight: Tensor, _rows: int) -> Product:
    """Return FBGEMM's product with one scale for all rows, which no target may use."""
    quantized = torch.quantize_per_tensor(weight, float(weight.abs().max()) / 127, 0, torch.qint8)
    operators: Any = torch.ops.quantized
    packed = operators.linear_prepack(quantized, None)
    return lambda x: operators.linear_dynamic(x, packed)


def _contender(product_of: Any, bytes_a_weight: int, dtype: torch.dtype) -> Contender:
    return partial(_pass, product_of, bytes_a_weight, dtype)


_FP32, _BF16, _FP16 = torch.float32, torch.bfloat16, torch.float16

CONTENDERS: Mapping[str, Contender] = {
    "float32": _contender(partial(_ours, "native", _FP32, None), 4, _FP32),
    "float32, stored in bfloat16": _contender(
        partial(_ours, "native", _FP32, None, stored=_BF16), 2, _FP32
    ),
    "bfloat16": _contender(partial(_ours, "native", _BF16, None), 2, _BF16),
    "float16": _contender(partial(_ours, "native", _FP16, None), 2, _FP16),
    "int8": _contender(partial(_ours, "native", _FP32, "int8"), 1, _FP32),
    "w8a8": _contender(partial(_ours, "native", _FP32, "w8a8"), 1, _FP32),
    "torch float32, x @ W": _contender(partial(_ours, "torch", _FP32, None), 4, _FP32),
    "torch float32, F.linear": _contender(partial(_linear, _FP32), 4, _FP32),
    "torch float32, MKL packed": _contender(_mkl_packed, 4, _FP32),
    "torch float32, oneDNN packed": _contender(_onednn_packed, 4, _FP32),
    "torch bfloat16, F.linear": _contender(partial(_linear, _BF16), 2, _BF16),
    "torch int8, FBGEMM by row": _contender(partial(_ours, "torch", _FP32, "int8"), 1, _FP32),
    "torch int8, scale by batch": _contender(_int8_by_batch, 1, _FP32),
}
"""Contenders by name; those without `torch` in the name are this project's kernels."""
