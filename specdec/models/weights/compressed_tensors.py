"""The layouts of compressed-tensors, the format of LLM Compressor.

With [out, in] the shape of a weight and p = 32 // bits the values in an integer, a layer has

- `weight` int8 or float8 [out, in], or packed: `weight_packed` int32 [out, in / p], the first value
  in the lowest bits, each plus 2^(bits - 1), and `weight_shape` [2]: out, in;
- `weight_scale`: one for the matrix [1], for each output [out, 1], for each group of inputs
  [out, groups], or for each block [out / rows, in / columns], rounded up;
- `weight_zero_point`, if the quantization is not symmetric: of the shape of the scales, or packed
  as the weights are, along the outputs: int32 [out / p, groups];
- `weight_g_idx` int32 [in], the group of each input, if they are permuted by activation order; -1
  for each if they turned out not to be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.config.json_values import count, unsupported
from specdec.models.weights.fp4 import PackedFp4
from specdec.models.weights.stored_tensors import TensorSource
from specdec.models.weights.weight_slices import as_slice, groups_of, sibling, units_of
from specdec.types.errors import UnsupportedModelError

_PACKED = "pack-quantized"
_PLAIN = ("float-quantized", "int-quantized", "naive-quantized")
_FP4 = {"nvfp4-pack-quantized": True, "mxfp4-pack-quantized": False}
"""Formats of 4-bit floats; True for NVFP4, False for MXFP4."""


@dataclass(frozen=True)
class CompressedTensors:
    """A WeightFormat: integers, packed or not, or 8-bit floats.

    bits: of a packed value. group_size: inputs that share a scale; None where scales are not by
    group. block: outputs and inputs that share a scale; None where scales are not by block.
    """

    bits: int
    group_size: int | None
    block: tuple[int, int] | None

    def holds(self, tensors: TensorSource, name: str) -> bool:
        """See WeightFormat."""
        return sibling(name, "weight_scale") in tensors

    def shape(self, tensors: TensorSource, name: str) -> tuple[int, ...]:
        """See WeightFormat."""
        if name in tensors:
            return tensors.shape(name)
        return tuple(tensors.slice(sibling(name, "weight_shape")).tolist())

    def read(self, tensors: TensorSource, name: str, rows: range, cols: range) -> Tensor:
        """See WeightFormat."""
        values = (
            tensors.slice(name, as_slice(rows), as_slice(cols)).float()
            if name in tensors
            else self._unpacked(tensors, name, rows, cols)
        )
        zero_points = self.zero_points(tensors, name, rows, cols)
        if zero_points is not None:
            values = values - zero_points
        return values * self._by_place(tensors, name, "weight_scale", rows, cols)

    def _unpacked(self, tensors: TensorSource, name: str, rows: range, cols: range) -> Tensor:
        held = units_of(cols, self._per_integer)
        stored = sibling(name, "weight_packed")
        packed = tensors.slice(stored, as_slice(rows), as_slice(held))
        start = cols.start - held.start * self._per_integer
        return self._unpack(packed)[:, start : start + len(cols)]

    def zero_points(
        self, tensors: TensorSource, name: str, rows: range, cols: range
    ) -> Tensor | None:
        """Return zero points that broadcast to [len(rows), len(cols)]; None without any."""
        stored = sibling(name, "weight_zero_point")
        if stored not in tensors:
            return None
        scales = tensors.shape(sibling(name, "weight_scale"))
        if tensors.shape(stored) == scales:
            return self._by_place(tensors, name, "weight_zero_point", rows, cols)
        held = units_of(rows, self._per_integer)
        packed = tensors.slice(stored, as_slice(held), slice(None))
        start = rows.start - held.start * self._per_integer
        of_groups: Tensor = self._unpack(packed.t()).t()[start : start + len(rows)]
        return of_groups[:, self._group_index(tensors, name, cols)]

    def _unpack(self, packed: Tensor) -> Tensor:
        """Return the values of integers [N, M] in float32, [N, M * p]."""
        shifts = torch.arange(self._per_integer, dtype=torch.int32) * self.bits
        values = (packed[:, :, None] >> shifts & (2**self.bits - 1)) - 2 ** (self.bits - 1)
        unpacked: Tensor = values.flatten(1).float()
        return unpacked

    @property
    def _per_integer(self) -> int:
        return 32 // self.bits

    def _by_place(
        self, tensors: TensorSource, name: str, suffix: str, rows: range, cols: range
    ) -> Tensor:
        """Return scales or zero points that broadcast to [len(rows), len(cols)], in float32.

        Raises UnsupportedModelError for a shape that is not described above.
        """
        stored = sibling(name, suffix)
        shape, (out_features, in_features) = tensors.shape(stored), self.shape(tensors, name)
        if shape in ((), (1,), (1, 1)):
            return tensors.slice(stored, *[slice(None)] * len(shape)).float().reshape(1, 1)
        if shape == (out_features, 1):
            return tensors.slice(stored, as_slice(rows), slice(None)).float()
        if self.group_size is not None and shape == (
            out_features,
            -(-in_features // self.group_size),
        ):
            found = tensors.slice(stored, as_slice(rows), slice(None)).float()
            return found[:, self._group_index(tensors, name, cols)]
        if self.block is not None and shape == (
            -(-out_features // self.block[0]),
            -(-in_features // self.block[1]),
        ):
            down = groups_of(rows, self.block[0], out_features)
            across = groups_of(cols, self.block[1], in_features)
            found = tensors.slice(stored, as_slice(down.held), as_slice(across.held)).float()
            return found[down.index][:, across.index]
        raise UnsupportedModelError(f"{stored} has shape {list(shape)}, which is not supported")

    def _group_index(self, tensors: TensorSource, name: str, cols: range) -> Tensor:
        """Return the group of each input, [len(cols)]."""
        stored = sibling(name, "weight_g_idx")
        if (
            stored in tensors
            and (index := tensors.slice(stored, as_slice(cols)).long()).ge(0).all()
        ):
            return index
        positions = torch.arange(cols.start, cols.stop)
        return positions // self.group_size if self.group_size else torch.zeros_like(positions)


def compressed_tensors(config: Mapping[str, Any]) -> CompressedTensors | PackedFp4 | None:
    """Return the layout of a `quantization_config`; None for one that is not supported.

    Raises UnsupportedModelError for groups of layers with different layouts.
    """
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    is_changed, layout = sparsity != "dense" or config.get("transform_config"), config.get("format")
    if is_changed or layout not in (_PACKED, *_PLAIN, *_FP4):
        return None
    found = {_layout(each.get("weights")) for each in (config.get("config_groups") or {}).values()}
    if len(found) > 1:
        raise UnsupportedModelError(
            "weights quantized by compressed-tensors with a layout for each group of layers are "
            "not supported; config_groups must have equal weights"
        )
    if layout in _FP4:
        return PackedFp4(_FP4[layout])
    bits, group_size, block = found.pop() if found else (8, None, None)
    if layout == _PACKED and not 2 <= bits <= 8:
        return None
    return CompressedTensors(bits, group_size, block)


def _layout(weights: Mapping[str, Any] | None) -> tuple[int, int | None, tuple[int, int] | None]:
    """Return bits, group size and block of the weights of a group of layers."""
    weights = weights or {}
    group_size, block = weights.get("group_size"), weights.get("block_structure")
    return (
        count(weights, "num_bits", 8),
        None if group_size in (None, -1) else count(weights, "group_size"),
        None if block is None else _block(block),
    )


def _block(sizes: object) -> tuple[int, int]:
    """Return the outputs and inputs of a block. Raises UnsupportedModelError."""
    match sizes:
        case [int(rows), int(cols)] if rows > 0 and cols > 0:
            return rows, cols
    raise unsupported("block_structure", sizes, "two numbers of at least 1")
