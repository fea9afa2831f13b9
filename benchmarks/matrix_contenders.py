"""Ways to multiply rows by the matrices of a model on a CPU: this project's and torch's."""

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
    """Some rows times every matrix, prepared. weight_bytes: what a pass has to read."""

    run: Callable[[], None]
    weight_bytes: int


Contender = Callable[[Sequence[Shape], int], Pass]
"""Prepares a pass over matrices of these shapes, for so many rows."""


def _pass(
    product_of: Callable[[Tensor, int], Product],
    bytes_a_weight: int,
    dtype: torch.dtype,
    shapes: Sequence[Shape],
    rows: int,
) -> Pass:
    """product_of: makes a product from a weight [out, in] and the number of rows."""
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
    """A matrix as layers hold it; stored: what it comes in, if that is not `dtype`."""
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
    """FBGEMM with one scale for all rows, which a target may not have."""
    quantized = torch.quantize_per_tensor(weight, float(weight.abs().max()) / 127, 0, torch.qint8)
    operators: Any = torch.ops.quantized
    packed = operators.linear_prepack(quantized, None)
    return lambda x: operators.linear_dynamic(x, packed)


def _contender(product_of: Any, bytes_a_weight: int, dtype: torch.dtype) -> Contender:
    return partial(_pass, product_of, bytes_a_weight, dtype)


_FLOAT, _BRAIN, _HALF = torch.float32, torch.bfloat16, torch.float16

CONTENDERS: Mapping[str, Contender] = {
    "float32": _contender(partial(_ours, "native", _FLOAT, None), 4, _FLOAT),
    "float32, stored in bfloat16": _contender(
        partial(_ours, "native", _FLOAT, None, stored=_BRAIN), 2, _FLOAT
    ),
    "bfloat16": _contender(partial(_ours, "native", _BRAIN, None), 2, _BRAIN),
    "float16": _contender(partial(_ours, "native", _HALF, None), 2, _HALF),
    "int8": _contender(partial(_ours, "native", _FLOAT, "int8"), 1, _FLOAT),
    "w8a8": _contender(partial(_ours, "native", _FLOAT, "w8a8"), 1, _FLOAT),
    "torch float32, x @ W": _contender(partial(_ours, "torch", _FLOAT, None), 4, _FLOAT),
    "torch float32, F.linear": _contender(partial(_linear, _FLOAT), 4, _FLOAT),
    "torch float32, MKL packed": _contender(_mkl_packed, 4, _FLOAT),
    "torch float32, oneDNN packed": _contender(_onednn_packed, 4, _FLOAT),
    "torch bfloat16, F.linear": _contender(partial(_linear, _BRAIN), 2, _BRAIN),
    "torch int8, FBGEMM by row": _contender(partial(_ours, "torch", _FLOAT, "int8"), 1, _FLOAT),
    "torch int8, scale by batch": _contender(_int8_by_batch, 1, _FLOAT),
}
"""By name; without `torch` in it, of this project."""
