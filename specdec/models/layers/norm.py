"""Root mean square layer normalization (Zhang and Sennrich 2019)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.models.weights.checkpoint import CheckpointReader


class RMSNorm(nn.Module):
    """Computes x / rms(x) * weight over the last dimension."""

    def __init__(self, reader: CheckpointReader, name: str, size: int, eps: float) -> None:
        super().__init__()
        self.weight = reader.read(name, (size,))
        self.eps = eps
        self._scaled_weight = self.weight * math.sqrt(size)
        self._scaled_eps = torch.tensor(math.sqrt(size * eps), device=self.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized x, [..., size]."""
        if x.dtype != torch.float32 or x.is_cuda:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # On CPUs F.rms_norm runs a dozen operators, whose overhead exceeds the arithmetic of a few
        # rows. These are four: sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(size * eps)) / sqrt(size).
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * self._scaled_weight).div_(torch.hypot(norm, self._scaled_eps))
