"""The layouts of AWQ and GPTQ: integers of 2, 4 or 8 bits with scales and zero points by group."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from specdec.models.weights.stored_tensors import TensorSource
from specdec.models.weights.tensor_headers import FLOATS, HeaderSource, require_tensor, sibling
from specdec.models.weights.weight_slices import (
    as_slice,
    groups_of,
    num_groups,
    resolved_group_size,
    units_of,
)
from specdec.types.errors import UnsupportedModelError

logger = logging.getLogger(__name__)

OTHER_VERSION = (
    "the zero points of this symmetric GPTQ checkpoint are of the other version of the layout than "
    "its checkpoint_format: they are read as half of the range"
)

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position of each of the eight packed columns in an integer, in 4-bit units from the lowest."""


@dataclass(frozen=True)
class Awq:
    """AutoAWQ's gemm layout (Lin et al. 2023): 4 bits, packed along the outputs.

    qweight: int32 [in, out / 8]; qzeros: int32 [in / group, out / 8]; scales: [in / group, out].
    group_size: number of inputs that share a scale and a zero point.
    """

    group_size: int

    def holds(self, tensors: HeaderSource, name: str) -> bool:
        """See WeightFormat."""
        return sibling(name, "qweight") in tensors

    def shape(self, tensors: TensorSource, name: str) -> tuple[int, ...]:
        """See WeightFormat."""
        in_features, packed = tensors.shape(sibling(name, "qweight"))
        return packed * 8, in_features

    def parts(self, tensors: HeaderSource, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        """See WeightFormat."""
        out, inner = shape
        groups = num_groups(inner, self.group_size)
        return (
            require_tensor(tensors, sibling(name, "qweight"), ("I32",), (inner, -(-out // 8))),
            require_tensor(tensors, sibling(name, "qzeros"), ("I32",), (groups, -(-out // 8))),
            require_tensor(tensors, sibling(name, "scales"), FLOATS, (groups, out)),
        )

    def read(self, tensors: TensorSource, name: str, rows: range, cols: range) -> Tensor:
        """See WeightFormat."""
        _, in_features = self.shape(tensors, name)
        groups = groups_of(cols, self.group_size, in_features)
        values = self.unpacked(tensors, sibling(name, "qweight"), cols, rows)
        zeros = self.unpacked(tensors, sibling(name, "qzeros"), groups.held, rows)
        scales = tensors.slice(
            sibling(name, "scales"), as_slice(groups.held), as_slice(rows)
        ).float()
        return ((values - zeros[groups.index]) * scales[groups.index]).t()

    def unpacked(self, tensors: TensorSource, name: str, lines: range, outputs: range) -> Tensor:
        """Return a part of a packed tensor, [len(lines), len(outputs)] int32."""
        held = units_of(outputs, 8)
        packed = tensors.slice(name, as_slice(lines), as_slice(held))
        shifts = 4 * torch.tensor(_AWQ_ORDER, dtype=torch.int32)
        unpacked = (packed[:, :, None] >> shifts & 15).flatten(1)
        start = outputs.start - 8 * held.start
        return unpacked[:, start : start + len(outputs)]


@dataclass(frozen=True)
class Gptq:
    """The layout of AutoGPTQ and GPTQModel (Frantar et al. 2022), packed along the inputs.

    qweight: int32 [in * bits / 32, out]; qzeros: int32 [groups, out * bits / 32]; scales: [groups,
    out]; g_idx: int32 [in], the group of each input, permuted by activation order.
    zero_offset: added to stored zero points; version 1 of the layout stores one less, as a
    subtraction from the integers: a zero point of 0 borrows from the next one.
    is_symmetric: whether each zero point is the middle of the range, by their description.
    is_reordered: whether weights of several groups may not lack g_idx. has_own_groups: whether some
    layers have groups of another size, which their scales show (`dynamic` of GPTQModel).
    """

    bits: int
    group_size: int
    zero_offset: int
    is_symmetric: bool = False
    is_reordered: bool = False
    has_own_groups: bool = False

    def holds(self, tensors: HeaderSource, name: str) -> bool:
        """See WeightFormat."""
        return sibling(name, "qweight") in tensors

    def shape(self, tensors: TensorSource, name: str) -> tuple[int, ...]:
        """See WeightFormat."""
        packed, out_features = tensors.shape(sibling(name, "qweight"))
        return out_features, packed * self._per_integer

    def parts(self, tensors: HeaderSource, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        """See WeightFormat."""
        out, inner = shape
        words, outputs = -(-inner * self.bits // 32), -(-out * self.bits // 32)
        groups = num_groups(inner, self.group_size_of(tensors, name, inner))
        index = sibling(name, "g_idx")
        found = (
            require_tensor(tensors, sibling(name, "qweight"), ("I32",), (words, out)),
            require_tensor(tensors, sibling(name, "qzeros"), ("I32",), (groups, outputs)),
            require_tensor(tensors, sibling(name, "scales"), FLOATS, (groups, out)),
        )
        if index not in tensors and not (self.is_reordered and groups > 1):
            return found
        return (*found, require_tensor(tensors, index, ("I32", "I64"), (inner,)))

    def group_size_of(self, tensors: HeaderSource, name: str, in_features: int) -> int:
        """Return the number of inputs of this weight that share a scale."""
        if self.has_own_groups:
            groups = tensors.shape(sibling(name, "scales"))[0]
            if groups and in_features % groups == 0:
                return in_features // groups
        return resolved_group_size(self.group_size, in_features)

    def read(self, tensors: TensorSource, name: str, rows: range, cols: range) -> Tensor:
        """See WeightFormat."""
        held = units_of(cols, self._per_integer)
        packed = tensors.slice(sibling(name, "qweight"), as_slice(held), as_slice(rows))
        values = self._unpack(packed[:, None, :], 1).flatten(0, 1)  # [inputs held, rows]
        start = cols.start - held.start * self._per_integer
        index = self.group_index(tensors, name, cols)
        scales = tensors.slice(sibling(name, "scales"), slice(None), as_slice(rows)).float()
        shifted = values[start : start + len(cols)] - self.zeros(tensors, name, rows)[index]
        return (shifted * scales[index]).t()

    @property
    def _per_integer(self) -> int:
        return 32 // self.bits

    def zeros(self, tensors: TensorSource, name: str, rows: range) -> Tensor:
        """Return the zero points of all groups, [groups, len(rows)] int32."""
        held = units_of(rows, self._per_integer)
        packed = tensors.slice(sibling(name, "qzeros"), slice(None), as_slice(held))
        packed = packed + _repeated(self._zero_offset(tensors, name), self.bits)
        unpacked = self._unpack(packed[:, :, None], 2).flatten(1)
        start = rows.start - held.start * self._per_integer
        return unpacked[:, start : start + len(rows)]

    def _zero_offset(self, tensors: TensorSource, name: str) -> int:
        """Return what is added to stored zero points.

        Those of a symmetric quantization show the version of the layout: all are the middle of the
        range in version 2, and one less in version 1.
        """
        if not self.has_other_version(tensors, name):
            return self.zero_offset
        warn_once(OTHER_VERSION)
        return 1 - self.zero_offset

    def has_other_version(self, tensors: TensorSource, name: str) -> bool:
        """Return whether zero points can only be of the version that the files do not name."""
        if not self.is_symmetric:
            return False
        stored = 2 ** (self.bits - 1) - (1 - self.zero_offset)
        words = tensors.slice(sibling(name, "qzeros"))
        return bool((words == _repeated(stored, self.bits)).all())

    def _unpack(self, packed: Tensor, dim: int) -> Tensor:
        """Unpack integers along dimension `dim` of `packed`, which has size 1."""
        shape = [1, 1, 1]
        shape[dim] = self._per_integer
        shifts = torch.arange(0, 32, self.bits, dtype=torch.int32).view(shape)
        unpacked: Tensor = packed >> shifts & (2**self.bits - 1)
        return unpacked

    def group_index(self, tensors: TensorSource, name: str, cols: range) -> Tensor:
        """Return the group of each input, [len(cols)] int64."""
        stored = sibling(name, "g_idx")
        if stored in tensors:
            groups = tensors.shape(sibling(name, "scales"))[0]
            found: Tensor = tensors.slice(stored).long()
            if len(found) and (found.min() < 0 or found.max() + 1 != groups):
                limit = f"groups from 0 to {groups - 1}, for which there are scales"
                raise UnsupportedModelError(f"{stored} must have all {limit}")
            return found[as_slice(cols)]
        _, in_features = self.shape(tensors, name)
        size = self.group_size_of(tensors, name, in_features)
        return torch.arange(cols.start, cols.stop) // size


def _repeated(value: int, bits: int) -> int:
    """Return the signed integer of 32 bits that is full of a value."""
    word = sum(value << place for place in range(0, 32, bits))
    return word - 2**32 if word >= 2**31 else word


@cache
def warn_once(message: str) -> None:
    """Log a warning, once in a process."""
    logger.warning(message)
