"""Rotary position embedding (Su et al. 2021), in the half-split layout of Hugging Face models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotation:
    """The rotation of each token of a batch; made once a forward pass, used by every layer."""

    cos: Tensor  # [T, 1, head_dim]
    sin: Tensor  # [T, 1, head_dim], its first half negated

    def apply_(self, x: Tensor) -> None:
        """Rotates x, [T, heads, head_dim], in place."""
        swapped = x.roll(x.shape[-1] // 2, dims=-1)
        x.mul_(self.cos).addcmul_(swapped, self.sin)


class RotaryEmbedding:
    """Angles for every position up to `max_positions`, computed in float32."""

    def __init__(self, head_dim: int, max_positions: int, theta: float, dtype: torch.dtype) -> None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        angles = torch.outer(torch.arange(max_positions).float(), 1.0 / theta**exponents)
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat((cos, cos), dim=-1)[:, None].to(dtype)
        self._sin = torch.cat((-sin, sin), dim=-1)[:, None].to(dtype)

    def rotation(self, positions: Tensor) -> Rotation:
        """positions: [T] int64, each below `max_positions`."""
        return Rotation(self._cos[positions], self._sin[positions])
