"""Dequantization of quantized checkpoints, by slices.

A weight `x.weight` [out_features, in_features] is stored as several tensors. Each class here is one
layout: it computes any rows and columns of the weight in float32, and reads only the parts of the
stored tensors that are needed. The layout is given by `quantization_config` in config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from specdec.models.weights.bitsandbytes import BitsAndBytes
from specdec.models.weights.compressed_tensors import compressed_tensors
from specdec.models.weights.gpt_oss import GptOssExperts
from specdec.models.weights.stored_tensors import TensorSource
from specdec.models.weights.weight_slices import (
    as_slice,
    groups_of,
    resolved_group_size,
    sibling,
    units_of,
)
from specdec.types.errors import UnsupportedModelError

SUPPORTED = (
    "awq (4 bits, gemm), gptq (2, 4 or 8 bits), fp8, compressed-tensors (packed or 8-bit integers, "
    "float8, nvfp4, mxfp4), bitsandbytes (nf4, fp4, int8), mxfp4 (experts of GPT-OSS)"
)

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position of each of the eight packed columns in an integer, in 4-bit units from the lowest."""


class WeightFormat(Protocol):
    """One layout of quantized weights. `name` is that of a weight, with `.weight` at its end."""

    def holds(self, tensors: TensorSource, name: str) -> bool:
        """Return whether this weight is quantized; some layers of a checkpoint usually are not."""
        ...

    def shape(self, tensors: TensorSource, name: str) -> tuple[int, ...]:
        """[out_features, in_features]."""
        ...

    def read(self, tensors: TensorSource, name: str, rows: range, cols: range) -> Tensor:
        """Return these rows and columns in float32, [len(rows), len(cols)]."""
        ...


@dataclass(frozen=True)
class Awq:
    """AutoAWQ's gemm layout (Lin et al. 2023): 4 bits, packed along the outputs.

    qweight: int32 [in, out / 8]; qzeros: int32 [in / group, out / 8]; scales: [in / group, out].
    group_size: number of inputs that share a scale and a zero point.
    """

    group_size: int

    def holds(self, tensors: TensorSource, name: str) -> bool:
        """See WeightFormat."""
        return sibling(name, "qweight") in tensors

    def shape(self, tensors: TensorSource, name: str) -> tuple[int, ...]:
        """See WeightFormat."""
        in_features, packed = tensors.shape(sibling(name, "qweight"))
        return packed * 8, in_features

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
    zero_offset: added to stored zero points; version 1 of the layout stores one less.
    """

    bits: int
    group_size: int
    zero_offset: int

    def holds(self, tensors: TensorSource, name: str) -> bool:
        """See WeightFormat."""
        return sibling(name, "qweight") in tensors

    def shape(self, tensors: TensorSource, name: str) -> tuple[int, ...]:
        """See WeightFormat."""
        packed, out_features = tensors.shape(sibling(name, "qweight"))
        return out_features, packed * self._per_integer

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
        unpacked = self._unpack(packed[:, :, None], 2).flatten(1)
        start = rows.start - held.start * self._per_integer
        return unpacked[:, start : start + len(rows)] + self.zero_offset

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
            return tensors.slice(stored, as_slice(cols)).long()
        _, in_features = self.shape(tensors, name)
        return torch.arange(cols.start, cols.stop) // resolved_group_size(
            self.group_size, in_features
        )


@dataclass(frozen=True)
class Float8:
    """8-bit floats with a scale for the whole matrix, for each output, or for each block.

    weight: float8 [out, in]; weight_scale: [1] or [], or [out, 1]; or weight_scale_inv: [out /
    block[0], in / block[1]], rounded up. Despite its name it is a factor too, not a divisor.
    """

    block: tuple[int, int] | None

    def holds(self, tensors: TensorSource, name: str) -> bool:
        """See WeightFormat."""
        return sibling(name, "weight_scale") in tensors or self._inverse(name) in tensors

    def shape(self, tensors: TensorSource, name: str) -> tuple[int, ...]:
        """See WeightFormat."""
        return tensors.shape(name)

    def read(self, tensors: TensorSource, name: str, rows: range, cols: range) -> Tensor:
        """See WeightFormat."""
        values = tensors.slice(name, as_slice(rows), as_slice(cols)).float()
        return values * self._scales(tensors, name, rows, cols)

    def _scales(self, tensors: TensorSource, name: str, rows: range, cols: range) -> Tensor:
        """Return scales that broadcast to [len(rows), len(cols)]."""
        if self._inverse(name) in tensors:
            return self._block_scales(tensors, name, rows, cols)
        stored = sibling(name, "weight_scale")
        shape = tensors.shape(stored)
        if shape in ((), (1,), (1, 1)):
            return tensors.slice(stored, *[slice(None)] * len(shape)).float().reshape(1, 1)
        if shape != (tensors.shape(name)[0], 1):
            raise UnsupportedModelError(f"{stored} has shape {list(shape)}, which is not supported")
        return tensors.slice(stored, as_slice(rows), slice(None)).float()

    def _block_scales(self, tensors: TensorSource, name: str, rows: range, cols: range) -> Tensor:
        if self.block is None:
            raise UnsupportedModelError(
                f"{self._inverse(name)} needs a weight_block_size in config.json"
            )
        out_features, in_features = tensors.shape(name)
        down = groups_of(rows, self.block[0], out_features)
        across = groups_of(cols, self.block[1], in_features)
        scales = tensors.slice(self._inverse(name), as_slice(down.held), as_slice(across.held))
        return scales.float()[down.index][:, across.index]

    def _inverse(self, name: str) -> str:
        return sibling(name, "weight_scale_inv")


def weight_format(config: Mapping[str, Any] | None) -> WeightFormat | None:
    """Return the layout of a `quantization_config`; None without one.

    Raises UnsupportedModelError, which lists the supported layouts.
    """
    if config is None:
        return None
    method, bits = config.get("quant_method"), config.get("bits", config.get("w_bit"))
    group_size = config.get("group_size", config.get("q_group_size", 128))
    if method == "awq" and bits == 4 and config.get("version", "gemm").lower() == "gemm":
        return Awq(group_size)
    if method == "gptq" and bits in (2, 4, 8):
        is_newer = config.get("checkpoint_format") == "gptq_v2"
        return Gptq(bits, group_size, 0 if is_newer else 1)
    if method == "fp8":
        block = config.get("weight_block_size")
        return Float8((block[0], block[1]) if block else None)
    if method == "mxfp4":
        return GptOssExperts()
    if method == "bitsandbytes" and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        return BitsAndBytes()
    if method == "compressed-tensors" and (found := compressed_tensors(config)) is not None:
        return found
    parts = (method, bits and f"{bits} bits", config.get("format"))
    described = " ".join(str(part) for part in parts if part)
    raise UnsupportedModelError(
        f"weights quantized by {described or 'an unnamed method'} are not supported; "
        f"supported: {SUPPORTED}"
    )
