"""Column-parallel and row-parallel linear layers, which read their shard of a checkpoint.

`matrix.py` stores and multiplies the weights; `CheckpointReader.quantization` selects the
quantization method.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdec.distributed.group import TensorParallelGroup
from specdec.models.layers.matrix import make_matrix
from specdec.models.weights.checkpoint import CheckpointReader


@dataclass(frozen=True)
class WeightPart:
    """One projection of a fused layer, and the output rows that a rank holds.

    name: prefix of its tensors in the checkpoint, `weight` and, if has_bias, `bias`.
    """

    name: str
    out_features: int
    rows: range
    has_bias: bool = False


class ColumnParallelLinear(nn.Module):
    """Fused projections of one input; each rank computes its shard of every output."""

    def __init__(self, reader: CheckpointReader, in_features: int, parts: list[WeightPart]) -> None:
        """Read this rank's rows of each part."""
        super().__init__()
        total = sum(len(part.rows) for part in parts)
        names = [f"{part.name}.weight" for part in parts]
        dtype = reader.exact_dtype(*names)
        weights = (
            reader.read(name, (part.out_features, in_features), rows=part.rows, dtype=dtype)
            for name, part in zip(names, parts, strict=True)
        )
        shape = (total, in_features)
        self.matrix = make_matrix(
            weights,
            shape,
            reader.dtype,
            quantization=reader.quantization,
            backend=reader.backend,
        )
        has_bias = any(part.has_bias for part in parts)
        self.bias = torch.cat(list(_biases(reader, parts))) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the parts side by side, [T, local outputs]; x: [T, in_features]."""
        if self.bias is None:
            return self.matrix.multiply(x)
        return self.matrix.multiply_add(self.bias, x)


class RowParallelLinear(nn.Module):
    """Projection with its input split over the ranks; an all-reduce sums the partial results."""

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
        weight_name = f"{name}.weight"
        dtype = reader.exact_dtype(weight_name)
        weight = reader.read(weight_name, shape, cols=cols, dtype=dtype)
        local_shape = (shape[0], len(cols))
        self.matrix = make_matrix(
            [weight],
            local_shape,
            reader.dtype,
            quantization=reader.quantization,
            backend=reader.backend,
        )
        self.bias = reader.read(f"{name}.bias", shape[:1]) if has_bias and group.rank == 0 else None
        self.group = group

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return `residual` plus the projection, equal on every rank.

        x: [T, local inputs]; residual: [T, out_features]. Rank 0 adds residual and bias to the sum.
        """
        if self.group.rank != 0:
            return self.group.all_reduce(self.matrix.multiply(x))
        if self.bias is not None:
            residual = residual + self.bias
        return self.group.all_reduce(self.matrix.multiply_add(residual, x))


def _biases(reader: CheckpointReader, parts: list[WeightPart]) -> Iterator[Tensor]:
    for part in parts:
        if part.has_bias:
            yield reader.read(f"{part.name}.bias", (part.out_features,), rows=part.rows)
        else:
            yield torch.zeros(len(part.rows), dtype=reader.dtype, device=reader.device)
