"""Weights of linear layers that stay in few bits on a device, and their values in torch.

The value of output n and input k is (code - zero) * scale; scale and zero point belong to an output
and a group of consecutive inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

CODES_PER_WORD = 8
"""4-bit codes in an integer, the first one in the lowest bits."""

SYMMETRIC_ZERO = 8
"""The zero point of 4-bit codes without stored ones."""

_TINY = torch.finfo(torch.float32).tiny


class CodeKind(Enum):
    """The codes of a packed weight."""

    INT4 = "int4"
    INT8 = "int8"
    FLOAT8 = "float8"


@dataclass(frozen=True)
class PackedWeight:
    """A weight [size, inner] in few bits.

    codes: INT4: int32 [size, inner / 8]; INT8: int8 [size, inner]; FLOAT8: float8_e4m3fn.
    scales: [size, groups], float32 or 16 bits. zeros: uint8 [size, groups] of INT4; None for 8.
    group_size: inputs of a group; the last one may have fewer.
    order: [inner] int64, the input that belongs to each column of the codes, where these are not in
    the order of the inputs (GPTQ's activation order); None where they are.
    """

    kind: CodeKind
    codes: Tensor
    scales: Tensor
    group_size: int
    zeros: Tensor | None = None
    order: Tensor | None = None

    def __post_init__(self) -> None:
        size, inner = self.shape
        assert self.scales.shape == (size, -(-inner // self.group_size))
        assert self.zeros is None or self.zeros.shape == self.scales.shape

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        size, columns = self.codes.shape
        return size, columns * (CODES_PER_WORD if self.kind is CodeKind.INT4 else 1)

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, scales and zero points."""
        parts = (self.codes, self.scales, self.zeros)
        return sum(each.numel() * each.element_size() for each in parts if each is not None)

    def to(self, device: torch.device) -> PackedWeight:
        """Return the weight on a device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        order = None if self.order is None else self.order.to(device)
        codes, scales = self.codes.to(device), self.scales.to(device)
        return replace(self, codes=codes, scales=scales, zeros=zeros, order=order)

    def take(self, rows: Tensor) -> PackedWeight:
        """Return some outputs; rows: [n] int64."""
        zeros = None if self.zeros is None else self.zeros[rows]
        codes = self.codes.view(torch.uint8)[rows].view(self.codes.dtype)
        return replace(self, codes=codes, scales=self.scales[rows], zeros=zeros)

    def part(self, rows: range) -> PackedWeight:
        """Return consecutive outputs as a view."""
        own = slice(rows.start, rows.stop)
        zeros = None if self.zeros is None else self.zeros[own]
        return replace(self, codes=self.codes[own], scales=self.scales[own], zeros=zeros)

    def values(self) -> Tensor:
        """Return the weight in float32, columns in the order of the codes."""
        index = torch.arange(self.shape[1], device=self.codes.device) // self.group_size
        if self.kind is not CodeKind.INT4:
            return self.codes.float() * self.scales.float()[:, index]
        codes = unpack_int4(self.codes).float()
        zeros = SYMMETRIC_ZERO if self.zeros is None else self.zeros.float()[:, index]
        return (codes - zeros) * self.scales.float()[:, index]


def unpack_int4(words: Tensor) -> Tensor:
    """Return the codes of words [..., W] as int32 [..., 8 * W]."""
    shifts = 4 * torch.arange(CODES_PER_WORD, dtype=torch.int32, device=words.device)
    unpacked: Tensor = (words[..., None] >> shifts & 15).flatten(-2)
    return unpacked


def pack_int4(codes: Tensor) -> Tensor:
    """Return words [..., W] int32 of codes [..., 8 * W] in range(16)."""
    shifts = 4 * torch.arange(CODES_PER_WORD, dtype=torch.int32, device=codes.device)
    pieces = codes.int().unflatten(-1, (-1, CODES_PER_WORD)) << shifts
    packed: Tensor = pieces.sum(-1, dtype=torch.int64).to(torch.int32)  # disjoint bits, which wrap
    return packed


def joined(parts: Sequence[PackedWeight]) -> PackedWeight | None:
    """Return the outputs of several weights of one input; None where they cannot be one weight."""
    first, *rest = parts
    if not rest:
        return first
    kinds = {(each.kind, each.group_size, each.scales.dtype) for each in parts}
    has_zeros = any(each.zeros is not None for each in parts)
    if len(kinds) > 1 or not all(_same_order(first, each) for each in rest):
        return None
    zeros = torch.cat([_zeros(each) for each in parts]) if has_zeros else None
    codes = torch.cat([each.codes.view(torch.uint8) for each in parts]).view(first.codes.dtype)
    scales = torch.cat([each.scales for each in parts])
    return replace(first, codes=codes, scales=scales, zeros=zeros)


def _zeros(weight: PackedWeight) -> Tensor:
    if weight.zeros is not None:
        return weight.zeros
    return torch.full(
        weight.scales.shape, SYMMETRIC_ZERO, dtype=torch.uint8, device=weight.codes.device
    )


def _same_order(left: PackedWeight, right: PackedWeight) -> bool:
    if left.order is None or right.order is None:
        return left.order is right.order
    return torch.equal(left.order, right.order)


def quantize_weight(weight: Tensor, kind: CodeKind, group_size: int | None = None) -> PackedWeight:
    """Quantize a weight [size, inner] to symmetric integers, rounded to nearest.

    group_size: inputs of a scale; None for one scale for each output. A scale maps the largest
    magnitude to the largest code: 127, or 7 of INT4.
    """
    inner = weight.shape[1]
    group = inner if group_size is None else group_size
    padding = -inner % group
    grouped = torch.nn.functional.pad(weight.float(), (0, padding)).unflatten(1, (-1, group))
    largest = 7 if kind is CodeKind.INT4 else 127
    scales = grouped.abs().amax(-1).div_(largest).clamp_min_(_TINY)
    codes = (grouped / scales[..., None]).round_().flatten(1)[:, :inner]
    if kind is CodeKind.INT4:
        return PackedWeight(kind, pack_int4(codes + SYMMETRIC_ZERO), scales, group)
    assert kind is CodeKind.INT8, "8-bit floats come from checkpoints"
    return PackedWeight(kind, codes.to(torch.int8), scales, group)
