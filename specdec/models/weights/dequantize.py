"""Dequantization of quantized checkpoints, by slices.

A weight `x.weight` [out_features, in_features] is stored as several tensors. Each class here is one
layout: it computes any rows and columns of the weight in float32, and reads only the parts of the
stored tensors that are needed. The layout is given by `quantization_config` in config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from specdec.config.json_values import count
from specdec.models.weights.awq_gptq import Awq, Gptq
from specdec.models.weights.bitsandbytes import BitsAndBytes
from specdec.models.weights.checks import Layout
from specdec.models.weights.compressed_tensors import (
    CompressedTensors,
    block_sizes,
    compressed_tensors,
)
from specdec.models.weights.fp4 import ModelOptFp4
from specdec.models.weights.gpt_oss import GptOssExperts
from specdec.models.weights.stored_tensors import TensorSource
from specdec.models.weights.tensor_headers import (
    ONE_SCALE,
    SCALES,
    HeaderSource,
    require_tensor,
    sibling,
)
from specdec.models.weights.weight_slices import as_slice, groups_of, num_groups
from specdec.types.errors import UnsupportedModelError

SUPPORTED = (
    "awq (4 bits, gemm), gptq (2, 4 or 8 bits), fp8, compressed-tensors (packed or 8-bit integers, "
    "float8, nvfp4, mxfp4, also mixed), modelopt (float8, nvfp4, also mixed), bitsandbytes (nf4, "
    "fp4, int8), mxfp4 (experts of GPT-OSS)"
)

_GPTQ_VERSIONS = {"gptq": 1, "gptq_v2": 0}
"""Offset of the zero points in each version of the layout."""

_MODELOPT = ("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "MIXED_PRECISION")
"""Algorithms of ModelOpt that store weights as NVFP4, or some layers so and others as float8."""

FLOAT8 = ("F8_E4M3", "F8_E5M2")


class WeightFormat(Layout, Protocol):
    """One layout of quantized weights. `name` is that of a weight, with `.weight` at its end."""

    def shape(self, tensors: TensorSource, name: str) -> tuple[int, ...]:
        """[out_features, in_features]."""
        ...

    def read(self, tensors: TensorSource, name: str, rows: range, cols: range) -> Tensor:
        """Return these rows and columns in float32, [len(rows), len(cols)]."""
        ...


@dataclass(frozen=True)
class Float8:
    """8-bit floats with a scale for the whole matrix, for each output, or for each block.

    weight: float8 [out, in]; weight_scale: [1] or [], [out, 1], or ModelOpt's [out]; or
    weight_scale_inv: [1] or [], or [out / block[0], in / block[1]], rounded up. Despite its name it
    is a factor too, not a divisor.
    """

    block: tuple[int, int] | None

    def holds(self, tensors: HeaderSource, name: str) -> bool:
        """See WeightFormat."""
        return sibling(name, "weight_scale") in tensors or self._inverse(name) in tensors

    def shape(self, tensors: TensorSource, name: str) -> tuple[int, ...]:
        """See WeightFormat."""
        return tensors.shape(name)

    def parts(self, tensors: HeaderSource, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        """See WeightFormat."""
        scale, inverse = sibling(name, "weight_scale"), self._inverse(name)
        if scale in tensors and inverse in tensors:
            raise UnsupportedModelError(f"{name} has both {scale} and {inverse}")
        shapes: list[tuple[int, ...]] = [*ONE_SCALE, (shape[0], 1), (shape[0],)]
        if inverse in tensors:
            shapes = [*ONE_SCALE]
            if self.block is not None:
                down, across = map(num_groups, shape, self.block)
                shapes = [(down, across)]
            elif tensors.shape(inverse) not in ONE_SCALE:
                raise UnsupportedModelError(f"{inverse} needs a weight_block_size in config.json")
        stored = inverse if inverse in tensors else scale
        return (
            require_tensor(tensors, name, FLOAT8, shape),
            require_tensor(tensors, stored, SCALES, *shapes),
        )

    def read(self, tensors: TensorSource, name: str, rows: range, cols: range) -> Tensor:
        """See WeightFormat."""
        values = tensors.slice(name, as_slice(rows), as_slice(cols)).float()
        return values * self._scales(tensors, name, rows, cols)

    def _scales(self, tensors: TensorSource, name: str, rows: range, cols: range) -> Tensor:
        """Return scales that broadcast to [len(rows), len(cols)]."""
        inverse = self._inverse(name)
        stored = inverse if inverse in tensors else sibling(name, "weight_scale")
        shape = tensors.shape(stored)
        if shape in ONE_SCALE:
            return tensors.slice(stored, *[slice(None)] * len(shape)).float().reshape(1, 1)
        if stored != inverse:
            others = [slice(None)] * (len(shape) - 1)
            return tensors.slice(stored, as_slice(rows), *others).float().reshape(-1, 1)
        assert self.block is not None, "parts refuses scales of blocks without their size"
        out_features, in_features = tensors.shape(name)
        down = groups_of(rows, self.block[0], out_features)
        across = groups_of(cols, self.block[1], in_features)
        scales = tensors.slice(stored, as_slice(down.held), as_slice(across.held))
        return scales.float()[down.index][:, across.index]

    def _inverse(self, name: str) -> str:
        return sibling(name, "weight_scale_inv")


@dataclass(frozen=True)
class SeveralLayouts:
    """Layouts for different layers: a weight has the one that its tensors are of.

    Their types and shapes decide, and not the patterns of names in config.json, except for zero
    points that are missing. A weight whose tensors are of several layouts, which would read them
    differently, is refused.
    """

    layouts: tuple[WeightFormat, ...]

    def holds(self, tensors: HeaderSource, name: str) -> bool:
        """See WeightFormat."""
        return any(each.holds(tensors, name) for each in self.layouts)

    def shape(self, tensors: TensorSource, name: str) -> tuple[int, ...]:
        """See WeightFormat."""
        return self.layout_of(tensors, name).shape(tensors, name)

    def parts(self, tensors: HeaderSource, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        """See WeightFormat."""
        return self._fitting(tensors, name, lambda _: shape).parts(tensors, name, shape)

    def read(self, tensors: TensorSource, name: str, rows: range, cols: range) -> Tensor:
        """See WeightFormat."""
        return self.layout_of(tensors, name).read(tensors, name, rows, cols)

    def layout_of(self, tensors: TensorSource, name: str) -> WeightFormat:
        """Return the layout of a quantized weight. Raises UnsupportedModelError without one."""
        return self._fitting(tensors, name, lambda layout: layout.shape(tensors, name))

    def _fitting(
        self, tensors: HeaderSource, name: str, shape: Callable[[WeightFormat], tuple[int, ...]]
    ) -> WeightFormat:
        """Return the layout that the tensors of a weight fit."""
        found: dict[object, WeightFormat] = {}
        faults: list[str] = []
        for layout in self.layouts:
            if layout.holds(tensors, name):
                try:
                    found.setdefault(_reading(layout, tensors, name, shape(layout)), layout)
                except UnsupportedModelError as error:
                    faults.append(str(error))
        if not found:
            raise UnsupportedModelError("; or ".join(dict.fromkeys(faults)))
        if len(found) > 1:
            raise UnsupportedModelError(
                f"the tensors of {name} fit several layouts that read them differently: "
                f"{'; and '.join(map(str, found.values()))}"
            )
        return next(iter(found.values()))


def _reading(
    layout: WeightFormat, tensors: HeaderSource, name: str, shape: tuple[int, ...]
) -> object:
    """Return what is equal for layouts that read a weight's tensors alike.

    Raises UnsupportedModelError where these do not fit.
    """
    if isinstance(layout, CompressedTensors):
        return layout.reading(tensors, name, shape)
    layout.parts(tensors, name, shape)
    return layout


def weight_format(config: Mapping[str, Any] | None) -> WeightFormat | None:
    """Return the layout of a `quantization_config`; None without one.

    Raises UnsupportedModelError, which lists the supported layouts.
    """
    if config is None:
        return None
    method, bits = config.get("quant_method"), config.get("bits", config.get("w_bit"))
    group_size = _group_size(config)
    if method == "awq" and bits == 4 and str(config.get("version", "gemm")).lower() == "gemm":
        return Awq(group_size)
    if method == "gptq" and bits in (2, 4, 8):
        kind = config.get("checkpoint_format") or "gptq"
        if kind in _GPTQ_VERSIONS and not config.get("is_marlin_format"):
            return Gptq(
                bits,
                group_size,
                _GPTQ_VERSIONS[kind],
                is_symmetric=config.get("sym") is True,
                is_reordered=bool(config.get("desc_act")),
                has_own_groups=bool(config.get("dynamic")),
            )
    if method == "fp8":
        key = "weight_block_size"
        return Float8(block_sizes(config, key) if config.get(key) else None)
    if method == "mxfp4":
        return GptOssExperts()
    if method == "bitsandbytes" and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        return BitsAndBytes()
    if method == "modelopt" and config.get("quant_algo") in _MODELOPT:
        return SeveralLayouts((ModelOptFp4(), Float8(None)))
    if method == "compressed-tensors" and (found := compressed_tensors(config)):
        return found[0] if len(found) == 1 else SeveralLayouts(found)
    kind = config.get("format") or config.get("checkpoint_format") or config.get("quant_algo")
    parts = (method, bits and f"{bits} bits", kind)
    described = " ".join(str(part) for part in parts if part)
    raise UnsupportedModelError(
        f"weights quantized by {described or 'an unnamed method'} are not supported; "
        f"supported: {SUPPORTED}"
    )


def _group_size(config: Mapping[str, Any]) -> int:
    """Return the inputs of a group, -1 for all. Raises UnsupportedModelError."""
    name = "q_group_size" if "q_group_size" in config else "group_size"
    return -1 if config.get(name) == -1 else count(config, name, 128)
