"""Root mean square layer normalisation (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from specdec.checkpoint import CheckpointReader


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, reader: CheckpointReader, name: str, size: int, eps: float) -> None:
        super().__init__()
        self.weight = reader.read(name, (size,))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, size]; returns the same shape."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
