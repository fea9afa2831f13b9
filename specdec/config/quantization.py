"""Quantization methods of linear layers."""

from __future__ import annotations

from typing import Literal, get_args

from specdec.types.errors import InvalidValueError

QuantizationMethod = Literal["int8", "w8a8"]
"""Both hold weights in 8 bits. `int8` multiplies by 16-bit activations, `w8a8` by 8-bit ones, which
is faster and coarser, and needs native kernels. A row's product never depends on the batch."""

QUANTIZATION_METHODS: tuple[QuantizationMethod, ...] = get_args(QuantizationMethod)


def require_quantization(method: str | None, field: str = "quantization") -> None:
    """Raise InvalidValueError for an unknown method."""
    if method is not None and method not in QUANTIZATION_METHODS:
        limit = f"one of {', '.join(QUANTIZATION_METHODS)}, or left out"
        raise InvalidValueError(field, method, limit)
