"""TODO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from specdec.types.errors import InvalidValueError

if TYPE_CHECKING:
    pass


QuantizationMethod = Literal["int8", "w8a8"]
"""How linear layers hold matrices, and multiply: `int8` by rows in 16 bits, `w8a8` by rows in 8
bits, which is faster, coarser, and for native kernels alone. A row's product never depends on the
batch."""


QUANTIZATION_METHODS: tuple[QuantizationMethod, ...] = get_args(QuantizationMethod)


def require_quantization(method: str | None, field: str = "quantization") -> None:
    """Raises InvalidValueError for a method that there is not."""
    if method is not None and method not in QUANTIZATION_METHODS:
        limit = f"one of {', '.join(QUANTIZATION_METHODS)}, or left out"
        raise InvalidValueError(field, method, limit)
