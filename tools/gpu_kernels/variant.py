"""A variant of a kernel that is compiled, and its description."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ARCHITECTURES = (80, 90)

Types = Mapping[str, str]


@dataclass(frozen=True)
class Variant:
    """A kernel with its constants, as it is launched.

    types: Triton's names of argument types, e.g. "*bf16" for an address. constants: compile-time
    arguments. options: number of warps and stages. architectures: that it is compiled for.
    multiples: integer arguments that are multiples of 16 for all models of this shape.
    """

    name: str
    kernel: Any
    types: Types
    constants: Mapping[str, object]
    options: Mapping[str, object] = field(default_factory=dict)
    architectures: tuple[int, ...] = ARCHITECTURES
    multiples: tuple[str, ...] = ()


ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8e4nv": 1, "fp8e5": 1}


def power_of_two(value: int) -> int:
    """Return the smallest power of two that is not less than a value."""
    return 1 << (value - 1).bit_length()
