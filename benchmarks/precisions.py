"""Formats of weights and arithmetic that benchmarks compare, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specdec.config.engine import DTypeName
from specdec.config.quantization import QuantizationMethod


@dataclass(frozen=True)
class Precision:
    """Named weight and compute format of a model."""

    name: str
    dtype: DTypeName
    quantization: QuantizationMethod | None = None


PRECISIONS: Mapping[str, Precision] = {
    each.name: each
    for each in (
        Precision("fp32", "float32"),
        Precision("bf16", "bfloat16"),
        Precision("int8", "float32", "int8"),
        Precision("int8-bf16", "bfloat16", "int8"),  # the rest of the model, and KV, in 16 bits
        Precision("w8a8", "float32", "w8a8"),
        Precision("w8a8-bf16", "bfloat16", "w8a8"),
    )
}
