"""Linear layers that know how a checkpoint's weights are split over ranks.

Weights are stored [in_features, out_features], the transpose of a checkpoint: for the few rows of
a decode or verification step the product is then up to twice as fast on a CPU (docs/adr/0003).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdec.checkpoint import CheckpointReader
from specdec.parallel import TensorParallelGroup


@dataclass(frozen=True)
class WeightPart:
    """One projection of a fused layer, and the output rows of it that a rank holds.

    name: prefix of its tensors in the checkpoint, `weight` and, where has_bias, `bias`.
    """

    name: str
    out_features: int
    rows: range
    has_bias: bool = False


class ColumnParallelLinear(nn.Module):
    """Several projections of one input, fused; each rank computes its share of every output."""

    def __init__(self, reader: CheckpointReader, in_features: int, parts: list[WeightPart]) -> None:
        """Reads only this rank's rows of each part."""
        super().__init__()
        total = sum(len(part.rows) for part in parts)
        self.weight = torch.empty(in_features, total, dtype=reader.dtype)
        has_bias = any(part.has_bias for part in parts)
        self.bias = torch.zeros(total, dtype=reader.dtype) if has_bias else None
        start = 0
        for part in parts:
            out, end = part.out_features, start + len(part.rows)
            weight = reader.read(f"{part.name}.weight", (out, in_features), rows=part.rows)
            self.weight[:, start:end] = weight.t()
            if self.bias is not None and part.has_bias:
                self.bias[start:end] = reader.read(f"{part.name}.bias", (out,), rows=part.rows)
            start = end

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, in_features]; returns [T, this rank's outputs], the parts side by side."""
        return x @ self.weight if self.bias is None else torch.addmm(self.bias, x, self.weight)


class RowParallelLinear(nn.Module):
    """A projection whose input is split over the ranks; the partial results are summed."""

    def __init__(
        self,
        reader: CheckpointReader,
        name: str,
        shape: tuple[int, int],
        cols: range,
        group: TensorParallelGroup,
        *,
        has_bias: bool = False,
    ) -> None:
        """name: as in WeightPart. shape: [out_features, in_features]. cols: this rank's inputs."""
        super().__init__()
        self.weight = reader.read(f"{name}.weight", shape, cols=cols).t().contiguous()
        self.bias = reader.read(f"{name}.bias", shape[:1]) if has_bias and group.rank == 0 else None
        self.group = group

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """Returns `residual` plus the projection, equal on every rank.

        x: [T, this rank's inputs]; residual: [T, out_features]. It and the bias are rank 0's to
        bring to the sum.
        """
        if self.group.rank != 0:
            return self.group.all_reduce(x @ self.weight)
        if self.bias is not None:
            residual = residual + self.bias
        return self.group.all_reduce(torch.addmm(residual, x, self.weight))
