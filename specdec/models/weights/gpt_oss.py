"""The experts of GPT-OSS: tensors of all experts together, in 16 or 32 bits or in MXFP4.

Layers read each expert as separate matrices, as in other mixtures; the names that they use here
do not exist in the files. Stored without quantization, with E experts, H hidden and I expert units:
`gate_up_proj` [E, H, 2 I] and `down_proj` [E, I, H], transposed, and biases [E, 2 I] and [E, H].
Gate and up projection alternate. In MXFP4 (`fp4.py`): `*_blocks` [E, out, in / 32, 16] of bytes
with two values each, and `*_scales` [E, out, in / 32].
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.models.weights.fp4 import e2m1_values, e8m0_scales
from specdec.models.weights.stored_tensors import SHORT_DTYPES, TensorSource
from specdec.models.weights.tensor_headers import FLOATS, HeaderSource, require_tensor
from specdec.types.errors import UnsupportedModelError

_NAME = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_GROUP = 32


@dataclass(frozen=True)
class _Part:
    """A tensor of one expert, as a part of a stored one.

    stored: name of the tensor of all experts. step: 2 where gate and up projection alternate;
    first: 0 for the gate, 1 for the up projection.
    """

    stored: str
    expert: int
    first: int
    step: int
    is_bias: bool

    def stored_rows(self, rows: range) -> slice:
        """Return the outputs of the stored tensor that contain `rows` of this one."""
        return slice(rows.start * self.step, rows.stop * self.step)

    def own(self, outputs: Tensor, dim: int) -> Tensor:
        """Return this part's of the stored outputs, along a dimension."""
        count = outputs.shape[dim]
        return outputs.index_select(dim, torch.arange(self.first, count, self.step))


def is_mxfp4(stored: str) -> bool:
    """Return whether a stored tensor, by its name, has codes of experts."""
    return stored.endswith("_proj_blocks")


def _part_of(name: str) -> _Part | None:
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    prefix, expert, projection, kind = match.groups()
    stored = f"{prefix}.{'down' if projection == 'down' else 'gate_up'}_proj"
    is_bias = kind == "bias"
    step = 1 if projection == "down" else 2
    first = 1 if projection == "up" else 0
    return _Part(f"{stored}_bias" if is_bias else stored, int(expert), first, step, is_bias)


@dataclass(frozen=True)
class GptOssExperts:
    """A WeightFormat: weights and biases of single experts, dequantized where they are in MXFP4."""

    def holds(self, tensors: HeaderSource, name: str) -> bool:
        """See WeightFormat; biases of experts are read in the same way."""
        part = _part_of(name)
        if part is None:
            return False
        return part.stored in tensors or f"{part.stored}_blocks" in tensors

    def shape(self, tensors: TensorSource, name: str) -> tuple[int, ...]:
        """See WeightFormat."""
        part = self._part(name)
        if part.is_bias:
            return (tensors.shape(part.stored)[1] // part.step,)
        if part.stored in tensors:
            _, inputs, outputs = tensors.shape(part.stored)
        else:
            _, outputs, groups, _ = tensors.shape(f"{part.stored}_blocks")
            inputs = groups * _GROUP
        return outputs // part.step, inputs

    def parts(self, tensors: HeaderSource, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        """See WeightFormat; shape: [out_features] of a bias."""
        part = self._part(name)
        blocks, scales = f"{part.stored}_blocks", f"{part.stored}_scales"
        is_plain = part.stored in tensors
        count = tensors.shape(part.stored if is_plain else blocks)[0]
        if part.expert >= count:
            raise UnsupportedModelError(f"{part.stored} has {count} experts, and not {name}")
        outputs = shape[0] * part.step
        if part.is_bias:
            return (require_tensor(tensors, part.stored, FLOATS, (count, outputs)),)
        if is_plain:
            return (require_tensor(tensors, part.stored, FLOATS, (count, shape[1], outputs)),)
        groups = shape[1] // _GROUP
        return (
            require_tensor(tensors, blocks, ("U8",), (count, outputs, groups, _GROUP // 2)),
            require_tensor(tensors, scales, ("U8",), (count, outputs, groups)),
        )

    def read(
        self, tensors: TensorSource, name: str, rows: range, cols: range | None = None
    ) -> Tensor:
        """See WeightFormat; without cols the rows of a bias, [len(rows)]."""
        part = self._part(name)
        expert, outputs = slice(part.expert, part.expert + 1), part.stored_rows(rows)
        if cols is None:
            return part.own(tensors.slice(part.stored, expert, outputs)[0].float(), 0)
        if part.stored in tensors:
            inputs = slice(cols.start, cols.stop)
            stored = tensors.slice(part.stored, expert, inputs, outputs)[0]
            return part.own(stored, 1).float().t()
        groups = slice(cols.start // _GROUP, -(-cols.stop // _GROUP))
        blocks = tensors.slice(f"{part.stored}_blocks", expert, outputs, groups, slice(None))[0]
        scales = tensors.slice(f"{part.stored}_scales", expert, outputs, groups)[0]
        values = _dequantize(part.own(blocks, 0), part.own(scales, 0))
        start = cols.start - groups.start * _GROUP
        return values[:, start : start + len(cols)]

    def short_dtype(self, tensors: TensorSource, name: str) -> torch.dtype | None:
        """Return the stored dtype if it is a 16-bit floating-point type, else None."""
        stored = self._part(name).stored
        return SHORT_DTYPES.get(tensors.dtype(stored)) if stored in tensors else None

    def _part(self, name: str) -> _Part:
        part = _part_of(name)
        assert part is not None, f"{name} is no tensor of an expert"
        return part


def _dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the values of MXFP4 groups in float32, [N, G * 32].

    blocks: [N, G, 16] uint8. scales: [N, G] uint8.
    """
    values = e2m1_values(blocks.flatten(1)).view(*scales.shape, _GROUP)
    return (values * e8m0_scales(scales).unsqueeze(-1)).flatten(1)
