"""Norms of hidden states, and of queries and keys."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.kernels.backend import row_kernels
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.traits import DecoderTraits, NormKind
from specdec.models.weights.checkpoint import CheckpointReader


class RMSNorm(nn.Module):
    """Root mean square layer normalization (Zhang and Sennrich 2019) over the last dimension.

    is_fused: whether `add` is one kernel, which saves a pass over the residual.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        name: str | None,
        size: int,
        eps: float,
        *,
        adds_one: bool = False,
        order: Sequence[int] | None = None,
    ) -> None:
        """Read the weights; without a name they are ones.

        adds_one: whether they are stored less one; they are then kept in float32, which 16 bits
        near one would round by up to half a percent. order: of the stored weights; None: theirs.
        """
        super().__init__()
        if name is None:
            self.weight = torch.ones(size, dtype=reader.dtype, device=reader.device)
        else:
            self.weight = reader.read(name, (size,), dtype=torch.float32 if adds_one else None)
        if order is not None:
            self.weight = self.weight[list(order)]
        if adds_one:
            self.weight += 1
        self.eps = eps
        self._kernels = row_kernels(reader.backend)
        self.is_fused = reader.backend.is_triton
        self._scaled_weight = self.weight * math.sqrt(size)
        self._scaled_eps = torch.tensor(math.sqrt(size * eps), device=self.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized x, [..., size]."""
        if x.dtype != torch.float32 or x.is_cuda or self.is_fused:
            return self._kernels.rms_norm(x, self.weight, self.eps)
        # On CPUs F.rms_norm runs a dozen operators, whose overhead exceeds the arithmetic of a few
        # rows. These are four: sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(size * eps)) / sqrt(size).
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * self._scaled_weight).div_(torch.hypot(norm, self._scaled_eps))

    def add(self, residual: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return residual + x, and that normalized; all [T, size]."""
        return self._kernels.add_rms_norm(residual, x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """Layer normalization (Ba et al. 2016) over the last dimension, in float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        """weight: [size], or [heads, size] where x is [..., heads, size]; bias: the same shape."""
        super().__init__()
        self.weight, self.bias, self.eps = weight.float(), bias, eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized x, of the same shape."""
        normed = F.layer_norm(x.float(), self.weight.shape[-1:], eps=self.eps) * self.weight
        return (normed if self.bias is None else normed + self.bias).to(x.dtype)


class AllHeadsNorm(nn.Module):
    """RMSNorm over the values of all heads, which the ranks share."""

    def __init__(
        self,
        reader: CheckpointReader,
        name: str,
        shape: tuple[int, int],
        own: range,
        counted: range,
        eps: float,
        group: TensorParallelGroup,
    ) -> None:
        """Read the weights of own heads.

        shape: all heads, head_dim. counted: own heads that no rank before this one has.
        """
        super().__init__()
        num_heads, head_dim = shape
        rows = range(own.start * head_dim, own.stop * head_dim)
        self.weight = reader.read(name, (num_heads * head_dim,), rows=rows).view(-1, head_dim)
        self.size, self.eps, self.group = num_heads * head_dim, eps, group
        self.counted = slice(counted.start - own.start, counted.stop - own.start)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized x [T, own heads, head_dim]; a collective call."""
        squares = x[:, self.counted].float().square().sum((1, 2))
        mean = self.group.all_reduce(squares) / self.size
        scaled = x.float() * torch.rsqrt(mean + self.eps)[:, None, None]
        return (scaled * self.weight.float()).to(x.dtype)


Norm = RMSNorm | LayerNorm
"""A norm of hidden states."""


def read_norm(
    reader: CheckpointReader,
    name: str,
    size: int,
    eps: float,
    traits: DecoderTraits,
    order: Sequence[int] | None = None,
) -> Norm:
    """Read a norm of hidden states. name: prefix of its tensors. order: see RMSNorm."""
    if traits.norm is NormKind.RMS:
        adds_one = traits.adds_one_to_norms
        return RMSNorm(reader, f"{name}.weight", size, eps, adds_one=adds_one, order=order)
    assert order is None, "no family rotates neighbours of heads that one LayerNorm normalizes"
    bias = reader.read(f"{name}.bias", (size,)) if traits.has_norm_bias else None
    return LayerNorm(reader.read(f"{name}.weight", (size,)), bias, eps)
