"""The layouts of compressed-tensors, the format of LLM Compressor.

With [out, in] the shape of a weight and p = 32 // bits the values in an integer, a layer has

- `weight` int8 or float8 [out, in], or packed: `weight_packed` int32 [out, in / p], the first value
  in the lowest bits, each plus 2^(bits - 1), and `weight_shape` [2]: out, in. Since version 0.20
  values of 3, 5, 6 and 7 bits follow each other without gaps, in [out, in * bits / 32] integers;
- `weight_scale`: one for the matrix [1], for each output [out, 1] or [out], for each group of
  inputs [out, groups], or for each block [out / rows, in / columns], rounded up;
- `weight_zero_point`, if the quantization is not symmetric: of the shape of the scales, where
  [out, 1] and [out] are alike, or packed as the weights are, along the outputs: int32
  [out / p, groups];
- `weight_g_idx` int32 [in], the group of each input, if they are permuted by activation order; -1
  for each if they turned out not to be.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.config.json_values import count, unsupported
from specdec.models.weights.fp4 import PackedFp4
from specdec.models.weights.stored_tensors import TensorSource
from specdec.models.weights.tensor_headers import (
    FLOATS,
    ONE_SCALE,
    SCALES,
    HeaderSource,
    require_tensor,
    sibling,
)
from specdec.models.weights.weight_slices import (
    VALUES_PER_UNIT,
    as_slice,
    groups_of,
    num_groups,
    units_of,
    unpack_dense,
)
from specdec.types.errors import UnsupportedModelError

_PATTERN, _UNNAMED = "re:", 3
_BYTES, _INDICES = ("I8", "F8_E4M3", "F8_E5M2"), ("I32", "I64")

PACKED = "pack-quantized"
_PLAIN = ("float-quantized", "int-quantized", "naive-quantized")
_FP4 = {"nvfp4-pack-quantized": True, "mxfp4-pack-quantized": False}
"""Formats of 4-bit floats; True for NVFP4, False for MXFP4."""


@dataclass(frozen=True)
class LayerGroup:
    """Layers that config.json describes together.

    names: of modules. patterns: of names. has_class: whether a target is a class of modules.
    """

    names: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]
    has_class: bool
    is_symmetric: bool

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> LayerGroup:
        """Return the group of an entry of `config_groups`; patterns that are invalid name none."""
        targets = described.get("targets")
        given = tuple(map(str, targets)) if isinstance(targets, list) else ()
        names = frozenset(each for each in given if not each.startswith(_PATTERN))
        patterns = map(_pattern, (each for each in given if each not in names))
        return cls(
            names,
            tuple(each for each in patterns if each is not None),
            any(each[:1].isupper() for each in names),
            _is_symmetric(described["weights"]),
        )

    def rank(self, module: str) -> int:
        """Return how closely a module is named: 0 by its name, 1 by a pattern, 2 by its class."""
        if module in self.names:
            return 0
        if any(each.match(module) for each in self.patterns):
            return 1
        return 2 if self.has_class else _UNNAMED


def _pattern(target: str) -> re.Pattern[str] | None:
    try:
        return re.compile(target.removeprefix(_PATTERN))
    except (re.error, OverflowError, RecursionError):
        return None


@dataclass(frozen=True)
class CompressedTensors:
    """A WeightFormat: integers, packed or not, or 8-bit floats.

    format, type: as in config.json; the tensors decide how they are read. bits: of a packed value.
    group_size: inputs that share a scale; None where scales are not by group. block: outputs and
    inputs that share a scale; None where scales are not by block. is_symmetric: whether weights may
    lack zero points. is_reordered: whether they may not lack the group of each input. groups: all
    groups of layers, of this layout or another, where only some may lack zero points.
    """

    format: str
    type: str
    bits: int
    group_size: int | None
    block: tuple[int, int] | None
    is_symmetric: bool = True
    is_reordered: bool = False
    groups: tuple[LayerGroup, ...] = ()

    def __str__(self) -> str:
        """Return the keys that describe it."""
        return (
            f"format {self.format}, type {self.type}, num_bits {self.bits}, "
            f"group_size {self.group_size}, block_structure {self.block}, "
            f"symmetric {self.is_symmetric}, actorder {self.is_reordered}"
        )

    def holds(self, tensors: HeaderSource, name: str) -> bool:
        """See WeightFormat."""
        return any(sibling(name, each) in tensors for each in ("weight_scale", "weight_packed"))

    def shape(self, tensors: TensorSource, name: str) -> tuple[int, ...]:
        """See WeightFormat."""
        if name in tensors:
            return tensors.shape(name)
        return tuple(tensors.slice(sibling(name, "weight_shape")).tolist())

    def parts(self, tensors: HeaderSource, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        """See WeightFormat."""
        if name in tensors:
            codes = [require_tensor(tensors, name, _BYTES, shape)]
        else:
            out, inner = shape
            stored = sibling(name, "weight_packed")
            widths = -(-inner // self._per_integer), _num_dense_words(inner, self.bits)
            if 32 % self.bits and widths[0] == widths[1] > 1:
                raise UnsupportedModelError(
                    f"{stored} has the shape of both layouts of {self.bits} bits, with and without "
                    "gaps between the values"
                )
            codes = [
                require_tensor(tensors, stored, ("I32",), *((out, width) for width in widths)),
                require_tensor(tensors, sibling(name, "weight_shape"), _INDICES, (2,)),
            ]
        return (*codes, *self._scale_parts(tensors, name, shape))

    def reading(
        self, tensors: HeaderSource, name: str, shape: tuple[int, ...]
    ) -> tuple[object, ...]:
        """Return what decides how the tensors of a weight are read.

        Raises UnsupportedModelError where one is missing or does not fit.
        """
        self.parts(tensors, name, shape)
        bits = None if name in tensors else self.bits
        if tensors.shape(sibling(name, "weight_scale")) in ONE_SCALE:
            return (bits,)
        sizes = self.block or (1, self.group_size or shape[1])
        return bits, self.block is None, *map(min, sizes, shape)

    def _scale_parts(
        self, tensors: HeaderSource, name: str, shape: tuple[int, ...]
    ) -> Iterator[str]:
        """Yield the names of the tensors beside the codes."""
        scales = sibling(name, "weight_scale")
        yield require_tensor(tensors, scales, SCALES, *self._scale_shapes(shape))
        zeros, index = sibling(name, "weight_zero_point"), sibling(name, "weight_g_idx")
        if zeros in tensors or self._has_zero_points(name):
            out, expected = shape[0], list(self._alike(tensors.shape(scales)))
            is_packed = tensors.dtype(zeros) == "I32" and name not in tensors and self.block is None
            if is_packed and tensors.shape(scales) not in ONE_SCALE:
                words = -(-out // self._per_integer), _num_dense_words(out, self.bits)
                expected += [(each, _num_groups(tensors, name)) for each in words]
            yield require_tensor(tensors, zeros, (*FLOATS, *_BYTES, *_INDICES, "U8"), *expected)
        if index in tensors or self.is_reordered:
            yield require_tensor(tensors, index, _INDICES, (shape[1],))

    def _has_zero_points(self, name: str) -> bool:
        """Return whether a weight may not lack zero points, by the groups that name it closest."""
        if not self.is_symmetric:
            return True
        module = name.removesuffix(".weight")
        ranks = [(each.rank(module), each.is_symmetric) for each in self.groups]
        closest = min((rank for rank, _ in ranks), default=_UNNAMED)
        own = [is_symmetric for rank, is_symmetric in ranks if rank == closest < _UNNAMED]
        return bool(own) and not any(own)

    def _alike(self, scales: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of tensors that are read as scales of this shape are."""
        if scales in ONE_SCALE:
            return ONE_SCALE
        is_by_output = self.block is None and scales[1:] in ((), (1,))
        return (scales[:1], (scales[0], 1)) if is_by_output else (scales,)

    def _scale_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes that scales may have."""
        if self.block is not None:
            return ((num_groups(shape[0], self.block[0]), num_groups(shape[1], self.block[1])),)
        if self.group_size is not None:
            return ((shape[0], num_groups(shape[1], self.group_size)),)
        return (*ONE_SCALE, (shape[0],), (shape[0], 1))

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
        stored, is_dense = sibling(name, "weight_packed"), self._is_dense(tensors, name)
        return self._window(tensors, stored, rows, cols, is_dense=is_dense, dim=1)

    def _is_dense(self, tensors: TensorSource, name: str) -> bool:
        """Return whether the integers of a packed weight hold values that cross their borders."""
        width = tensors.shape(sibling(name, "weight_packed"))[1]
        inner = self.shape(tensors, name)[1]
        return 32 % self.bits != 0 and width == _num_dense_words(inner, self.bits)

    def _window(
        self,
        tensors: TensorSource,
        stored: str,
        plain: range,
        packed: range,
        *,
        is_dense: bool,
        dim: int,
    ) -> Tensor:
        """Return values of a tensor that is packed along `dim`, [len(plain), len(packed)] float32.

        plain, packed: the positions along the other dimension, and along `dim`.
        """
        per_unit = VALUES_PER_UNIT if is_dense else self._per_integer
        held, words = units_of(packed, per_unit), self.bits if is_dense else 1
        stop = min(held.stop * words, tensors.shape(stored)[dim])
        window = [as_slice(plain), slice(held.start * words, stop)]
        found = tensors.slice(stored, *(window if dim == 1 else window[::-1]))
        found = found if dim == 1 else found.t()
        unpacked = unpack_dense(found, self.bits) if is_dense else self._unpack(found)
        start = packed.start - held.start * per_unit
        values = unpacked[:, start : start + len(packed)].float()
        return values.sub_(2 ** (self.bits - 1))

    def zero_points(
        self, tensors: TensorSource, name: str, rows: range, cols: range
    ) -> Tensor | None:
        """Return zero points that broadcast to [len(rows), len(cols)]; None without any."""
        stored = sibling(name, "weight_zero_point")
        if stored not in tensors:
            return None
        if tensors.shape(stored) in self._alike(tensors.shape(sibling(name, "weight_scale"))):
            return self._by_place(tensors, name, "weight_zero_point", rows, cols)
        is_dense, groups = self._is_dense(tensors, name), range(_num_groups(tensors, name))
        of_groups = self._window(tensors, stored, groups, rows, is_dense=is_dense, dim=0).t()
        return of_groups[:, self._group_index(tensors, name, cols)]

    def _unpack(self, packed: Tensor) -> Tensor:
        """Return the unsigned values of integers [N, M], [N, M * p] int32."""
        shifts = torch.arange(self._per_integer, dtype=torch.int32) * self.bits
        unpacked: Tensor = (packed[:, :, None] >> shifts & (2**self.bits - 1)).flatten(1)
        return unpacked

    @property
    def _per_integer(self) -> int:
        return 32 // self.bits

    def _by_place(
        self, tensors: TensorSource, name: str, suffix: str, rows: range, cols: range
    ) -> Tensor:
        """Return scales or zero points that broadcast to [len(rows), len(cols)], in float32."""
        stored = sibling(name, suffix)
        shape, (out_features, in_features) = tensors.shape(stored), self.shape(tensors, name)
        if shape in ONE_SCALE:
            return tensors.slice(stored, *[slice(None)] * len(shape)).float().reshape(1, 1)
        if self.block is not None:
            down = groups_of(rows, self.block[0], out_features)
            across = groups_of(cols, self.block[1], in_features)
            found = tensors.slice(stored, as_slice(down.held), as_slice(across.held)).float()
            return found[down.index][:, across.index]
        found = tensors.slice(stored, as_slice(rows), *[slice(None)] * (len(shape) - 1)).float()
        if shape[1:] in ((), (1,)):
            return found.reshape(-1, 1)
        return found[:, self._group_index(tensors, name, cols)]

    def _group_index(self, tensors: TensorSource, name: str, cols: range) -> Tensor:
        """Return the group of each input, [len(cols)]."""
        stored = sibling(name, "weight_g_idx")
        if (
            stored in tensors
            and (index := tensors.slice(stored, as_slice(cols)).long()).ge(0).all()
        ):
            groups = _num_groups(tensors, name)
            if not index.lt(groups).all():
                raise UnsupportedModelError(f"{stored} must have groups from 0 to {groups - 1}")
            return index
        positions = torch.arange(cols.start, cols.stop)
        return positions // self.group_size if self.group_size else torch.zeros_like(positions)


def compressed_tensors(config: Mapping[str, Any]) -> tuple[CompressedTensors | PackedFp4, ...]:
    """Return the layouts of a `quantization_config`, which differ by groups of layers.

    None of them where one is not supported.
    """
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense" or config.get("transform_config"):
        return ()
    described = [
        each for each in (config.get("config_groups") or {}).values() if each.get("weights")
    ]
    is_mixed = len({_is_symmetric(each["weights"]) for each in described}) > 1
    groups = tuple(LayerGroup.of(each) for each in described) if is_mixed else ()
    layouts = [
        _layout(str(each.get("format") or config.get("format")), each.get("weights") or {}, groups)
        for each in described or [{}]
    ]
    found = tuple(each for each in dict.fromkeys(layouts) if each is not None)
    return found if None not in layouts else ()


def _num_groups(tensors: HeaderSource, name: str) -> int:
    """Return the groups of inputs that a weight has scales for."""
    shape = tensors.shape(sibling(name, "weight_scale"))
    return shape[1] if len(shape) > 1 else 1


def _num_dense_words(num_values: int, bits: int) -> int:
    """Return the integers that hold values without gaps."""
    return -(-num_values * bits // 32)


def _is_symmetric(weights: Mapping[str, Any]) -> bool:
    return weights.get("symmetric") is not False


def _layout(
    kind: str, weights: Mapping[str, Any], groups: tuple[LayerGroup, ...]
) -> CompressedTensors | PackedFp4 | None:
    """Return the layout of the weights of a group of layers; None for one that is not supported."""
    if kind in _FP4:
        return PackedFp4(_FP4[kind])
    bits = count(weights, "num_bits", 8)
    group_size, block = weights.get("group_size"), "block_structure"
    if kind not in _PLAIN and not (kind == PACKED and 2 <= bits <= 8):
        return None
    return CompressedTensors(
        kind,
        str(weights.get("type") or "int"),
        bits,
        None if group_size in (None, -1) else count(weights, "group_size"),
        None if weights.get(block) is None else block_sizes(weights, block),
        is_symmetric=_is_symmetric(weights),
        is_reordered=weights.get("actorder") in ("group", True),
        groups=groups,
    )


def block_sizes(config: Mapping[str, Any], name: str) -> tuple[int, int]:
    """Return the outputs and inputs of a block. Raises UnsupportedModelError."""
    match config.get(name):
        case [int(rows), int(cols)] if rows > 0 and cols > 0:
            return rows, cols
    raise unsupported(name, config.get(name), "two numbers of at least 1")
