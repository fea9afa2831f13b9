"""The quantization methods of linear layers."""

from __future__ import annotations

from typing import Literal, get_args

from specdec.types.errors import InvalidValueError

QuantizationMethod = Literal["int8", "w8a8"]
"""`int8`: 8-bit weights, 16-bit activations. `w8a8`: 8-bit weights and activations, which is faster
and less accurate, and needs native kernels. The product of a row does not depend on the batch."""


QUANTIZATION_METHODS: tuple[QuantizationMethod, ...] = get_args(QuantizationMethod)

CheckpointQuantization = Literal[
    "awq", "gptq", "fp8", "compressed-tensors", "bitsandbytes", "mxfp4"
]
"""How the weights in the files of a model may be quantized; they are dequantized by loading."""

CHECKPOINT_QUANTIZATIONS: tuple[CheckpointQuantization, ...] = get_args(CheckpointQuantization)


def require_quantization(method: str | None, field: str = "quantization") -> None:
    """Raise InvalidValueError for an unknown method."""
    if method is not None and method not in QUANTIZATION_METHODS:
        limit = f"one of {', '.join(QUANTIZATION_METHODS)}, or left out"
        raise InvalidValueError(field, method, limit)
