"""4-bit floats with scales by group: MXFP4, and the layouts of NVFP4 and MXFP4 in single matrices.

A value has two bits of exponent and one of mantissa (E2M1); bit 3 is the sign, and the first of two
values is in the lower half of a byte. MXFP4 has an exponent of two for each 32 inputs (OCP
Microscaling Formats, version 1.0), NVFP4 a float8 for each 16 and a divisor for the matrix.

compressed-tensors stores a layer as `weight_packed` uint8 [out, in / 2] and `weight_scale`, float8
[out, in / 16] or uint8 [out, in / 32]; for NVFP4 also `weight_global_scale` [1], the divisor.
ModelOpt has the codes as `weight`, and `weight_scale_2` [] or [1], a factor, for the divisor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specdec.models.weights.stored_tensors import TensorSource
from specdec.models.weights.tensor_headers import (
    FLOATS,
    ONE_SCALE,
    HeaderSource,
    require_tensor,
    sibling,
)
from specdec.models.weights.weight_slices import as_slice, groups_of, units_of

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_BIAS = 127
_NVFP4_GROUP, _MXFP4_GROUP = 16, 32


def e2m1_values(packed: Tensor) -> Tensor:
    """Return the values of bytes [N, M] uint8 in float32, [N, 2 M]."""
    table = torch.tensor([*_MAGNITUDES, *(-each for each in _MAGNITUDES)])
    halves = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    return table[halves.int()]


def e8m0_scales(stored: Tensor) -> Tensor:
    """Return powers of two in float32, of the shape of `stored` uint8."""
    exponents = stored.to(torch.int32).sub_(_SCALE_BIAS)
    return torch.ldexp(torch.ones(stored.shape), exponents)


@dataclass(frozen=True)
class PackedFp4:
    """A WeightFormat: NVFP4 or MXFP4 matrices of compressed-tensors.

    codes, whole: names of the tensors of codes, and of the number of the whole matrix.
    """

    is_nvfp4: bool
    codes: ClassVar[str] = "weight_packed"
    whole: ClassVar[str] = "weight_global_scale"

    def holds(self, tensors: HeaderSource, name: str) -> bool:
        """See WeightFormat."""
        return sibling(name, self.codes) in tensors

    def shape(self, tensors: TensorSource, name: str) -> tuple[int, ...]:
        """See WeightFormat."""
        out_features, num_bytes = tensors.shape(sibling(name, self.codes))
        return out_features, 2 * num_bytes

    def parts(self, tensors: HeaderSource, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        """See WeightFormat."""
        out, inner = shape
        groups = -(-inner // (_NVFP4_GROUP if self.is_nvfp4 else _MXFP4_GROUP))
        scale = "F8_E4M3" if self.is_nvfp4 else "U8"
        found = (
            require_tensor(tensors, sibling(name, self.codes), ("U8",), (out, -(-inner // 2))),
            require_tensor(tensors, sibling(name, "weight_scale"), (scale,), (out, groups)),
        )
        if not self.is_nvfp4:
            return found
        return (*found, require_tensor(tensors, sibling(name, self.whole), FLOATS, *ONE_SCALE))

    def read(self, tensors: TensorSource, name: str, rows: range, cols: range) -> Tensor:
        """See WeightFormat."""
        held = units_of(cols, 2)
        packed = tensors.slice(sibling(name, self.codes), as_slice(rows), as_slice(held))
        start = cols.start - 2 * held.start
        values = e2m1_values(packed)[:, start : start + len(cols)]
        return values * self._scales(tensors, name, rows, cols)

    def _scales(self, tensors: TensorSource, name: str, rows: range, cols: range) -> Tensor:
        """Return the scale of each value, [len(rows), len(cols)] float32."""
        size = _NVFP4_GROUP if self.is_nvfp4 else _MXFP4_GROUP
        _, in_features = self.shape(tensors, name)
        groups, stored = groups_of(cols, size, in_features), sibling(name, "weight_scale")
        found = tensors.slice(stored, as_slice(rows), as_slice(groups.held))
        if self.is_nvfp4:
            whole = tensors.slice(sibling(name, self.whole)).float().reshape(1)
            return self._scaled(found.float(), whole)[:, groups.index]
        return e8m0_scales(found)[:, groups.index]

    def _scaled(self, scales: Tensor, whole: Tensor) -> Tensor:
        """Apply the number of the whole matrix to the scales of groups."""
        return scales / whole


@dataclass(frozen=True)
class ModelOptFp4(PackedFp4):
    """A WeightFormat: NVFP4 matrices of ModelOpt."""

    is_nvfp4: bool = True
    codes: ClassVar[str] = "weight"
    whole: ClassVar[str] = "weight_scale_2"

    def holds(self, tensors: HeaderSource, name: str) -> bool:
        """See WeightFormat."""
        return sibling(name, self.whole) in tensors

    def _scaled(self, scales: Tensor, whole: Tensor) -> Tensor:
        return scales * whole
