"""Rotary position embedding (Su et al. 2021), in the half-split layout of Hugging Face models.

Checkpoints whose pairs are neighbours instead are reordered when they are read; a score is a sum
over the dimensions of a head, in any order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specdec.kernels import Rotation
from specdec.models.config.model_config import ModelConfig
from specdec.models.config.rope import (
    DefaultRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    ProportionalRope,
    Rope,
    YarnRope,
)


class RotaryEmbedding:
    """Table of cosines and sines for positions below `max_positions`, computed in float32."""

    def __init__(
        self,
        rotary_dim: int,
        max_positions: int,
        rope: Rope,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.rotary_dim, self.max_positions, self._rope = rotary_dim, max_positions, rope
        cos, sin = self.tables()
        self._cos = torch.cat((cos, cos), dim=-1)[:, None].to(device=device, dtype=dtype)
        self._sin = torch.cat((-sin, sin), dim=-1)[:, None].to(device=device, dtype=dtype)

    def tables(self) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of each position, [max_positions, rotary_dim / 2] float32 each.

        Computed on the CPU, so that their bits do not depend on the device.
        """
        positions = torch.arange(self.max_positions, device="cpu").float()
        found = frequencies(self._rope, self.rotary_dim, self.max_positions)
        angles = torch.outer(positions, found)
        rope = self._rope
        scale = rope.attention_factor if isinstance(rope, YarnRope | LongRope) else 1.0
        return angles.cos() * scale, angles.sin() * scale

    def rotation(self, positions: Tensor) -> Rotation:
        """Return the rotations of positions [T] int64, each below `max_positions`."""
        return Rotation(self._cos[positions], self._sin[positions])


def frequencies(rope: Rope, rotary_dim: int, max_positions: int) -> Tensor:
    """Return the angle per position in radians, [rotary_dim / 2] float32, highest first."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64, device="cpu").float() / rotary_dim
    plain = 1.0 / rope.theta**exponents
    match rope:
        case DefaultRope():
            return plain
        case LinearRope():
            return plain / rope.factor
        case Llama3Rope():
            return _llama3(rope, plain)
        case YarnRope():
            return _yarn(rope, plain)
        case ProportionalRope():
            return _proportional(rope, plain)
        case LongRope():
            return plain / torch.tensor(rope.factors(max_positions))


def _proportional(rope: ProportionalRope, plain: Tensor) -> Tensor:
    """Return the first frequencies of `plain` [head_dim / 2], and 0 for the others."""
    num_rotated = int(rope.fraction * 2 * len(plain) // 2)
    is_rotated = torch.arange(len(plain), device=plain.device) < num_rotated
    return torch.where(is_rotated, plain / rope.factor, 0.0)


def _llama3(rope: Llama3Rope, plain: Tensor) -> Tensor:
    """Interpolate frequencies by their number of periods in the original context (Llama 3).

    plain: [head_dim / 2].
    """
    waves = rope.original_max_position_embeddings * plain / (2 * math.pi)
    width = (rope.high_freq_factor - rope.low_freq_factor) or 1e-9  # equal: no interpolation
    kept = ((waves - rope.low_freq_factor) / width).clamp(0, 1)
    return torch.lerp(plain / rope.factor, plain, kept)


def _yarn(rope: YarnRope, plain: Tensor) -> Tensor:
    """Apply NTK-by-parts interpolation (YaRN, section 3.2), with a ramp over dimensions.

    plain: [head_dim / 2].
    """
    begin, end = (_dimension_with(turns, rope, plain) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        begin, end = math.floor(begin), math.ceil(end)
    begin, end = max(begin, 0), min(end, 2 * len(plain) - 1)
    steps = torch.arange(len(plain), dtype=torch.float32, device=plain.device)
    ramp = ((steps - begin) / ((end - begin) or 0.001)).clamp(0, 1)
    return torch.lerp(plain, plain / rope.factor, ramp)


def _dimension_with(turns: float, rope: YarnRope, plain: Tensor) -> float:
    """Return the dimension of `plain` [head_dim / 2] with `turns` periods in the context."""
    wanted_over_fastest = rope.original_max_position_embeddings / (turns * 2 * math.pi)
    return len(plain) * math.log(wanted_over_fastest) / math.log(rope.theta)


def query_scales(config: ModelConfig, max_positions: int) -> dict[int, Tensor]:
    """Return the factor of queries at each position, [max_positions] float32, of layers with one.

    All layers share the tensor.
    """
    scale = config.traits.query_scale
    if scale is None:
        return {}
    steps = (torch.arange(max_positions, device="cpu").float() + scale.offset) / scale.length
    table = 1.0 + scale.beta * torch.log1p(steps.floor())
    return {
        index: table
        for index, rope in enumerate(config.ropes)
        if rope is None or not scale.is_without_rope
    }


def rotary_halves(head_dim: int, rotary_dim: int) -> tuple[int, ...]:
    """Return the order that turns rotary pairs of neighbours into pairs across halves."""
    return (*range(0, rotary_dim, 2), *range(1, rotary_dim, 2), *range(rotary_dim, head_dim))
