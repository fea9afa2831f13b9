"""The quantization methods of linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, get_args

from specdec.types.errors import InvalidValueError

QuantizationMethod = Literal["int8", "w8a8", "int4"]
"""`int8`: 8-bit weights, 16-bit activations. `w8a8`: 8-bit weights and activations, which is faster
and less accurate, and needs native kernels. `int4`: 4-bit weights in groups of inputs, 16-bit
activations, on GPUs. The product of a row does not depend on the batch."""


QUANTIZATION_METHODS: tuple[QuantizationMethod, ...] = get_args(QuantizationMethod)

CPU_QUANTIZATION_METHODS: tuple[QuantizationMethod, ...] = ("int8", "w8a8")
GPU_QUANTIZATION_METHODS: tuple[QuantizationMethod, ...] = ("int8", "int4")

INT4_GROUP = 128
"""Inputs of a weight in `int4` that share a scale, of 32 bits."""

WEIGHT_BITS: Mapping[QuantizationMethod, float] = MappingProxyType(
    {"int8": 8, "w8a8": 8, "int4": 4 + 32 / INT4_GROUP}
)
"""Bits of a weight of a matrix."""

CheckpointQuantization = Literal[
    "awq", "gptq", "fp8", "compressed-tensors", "modelopt", "bitsandbytes", "mxfp4"
]
"""How the weights in the files of a model may be quantized. They stay so on GPUs with kernels for
them, and are dequantized by loading elsewhere."""

CHECKPOINT_QUANTIZATIONS: tuple[CheckpointQuantization, ...] = get_args(CheckpointQuantization)


def require_quantization(method: str | None, field: str = "quantization") -> None:
    """Raise InvalidValueError for an unknown method."""
    if method is not None and method not in QUANTIZATION_METHODS:
        limit = f"one of {', '.join(QUANTIZATION_METHODS)}, or left out"
        raise InvalidValueError(field, method, limit)
