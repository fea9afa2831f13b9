"""Linear layers that know how a checkpoint's weights are split over ranks.

How a rank's matrix is held and multiplied is in `matrix.py`; `CheckpointReader.quantization` says
whether it is quantized.
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
            kernels=reader.kernels,
            device=reader.device,
        )
        has_bias = any(part.has_bias for part in parts)
        self.bias = torch.cat(list(_biases(reader, parts))) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, in_features]; returns [T, this rank's outputs], the parts side by side."""
        if self.bias is None:
            return self.matrix.multiply(x)
        return self.matrix.multiply_add(self.bias, x)


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
        weight_name = f"{name}.weight"
        dtype = reader.exact_dtype(weight_name)
        weight = reader.read(weight_name, shape, cols=cols, dtype=dtype)
        local_shape = (shape[0], len(cols))
        self.matrix = make_matrix(
            [weight],
            local_shape,
            reader.dtype,
            quantization=reader.quantization,
            kernels=reader.kernels,
            device=reader.device,
        )
        self.bias = reader.read(f"{name}.bias", shape[:1]) if has_bias and group.rank == 0 else None
        self.group = group

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """Returns `residual` plus the projection, equal on every rank.

        x: [T, this rank's inputs]; residual: [T, out_features]. It and the bias are rank 0's to
        bring to the sum.
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
