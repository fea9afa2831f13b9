"""Projections of an input that every rank has, such as a token's feature."""

from __future__ import annotations

from torch import Tensor, nn

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.layers.linear import RowParallelLinear
from specdec.models.weights.checkpoint import CheckpointReader


class SharedInputLinear(nn.Module):
    """Projection whose input and output are equal on all ranks; each computes a part of the sums.

    A copy of the weights on every rank would need no all-reduce, but the outputs must be the same
    bits on all ranks, which different machines' kernels do not guarantee.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        name: str,
        shape: tuple[int, int],
        group: TensorParallelGroup,
        *,
        has_bias: bool = False,
    ) -> None:
        """name: prefix of `weight` and `bias`. shape: [out_features, in_features]."""
        super().__init__()
        self.columns = group.share_of(shape[1])
        self.out_features = shape[0]
        self.linear = RowParallelLinear(reader, name, shape, self.columns, group, has_bias=has_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, out_features]; x: [T, in_features]."""
        own = x[:, self.columns.start : self.columns.stop]
        output: Tensor = self.linear(own, x.new_zeros(len(x), self.out_features))
        return output
