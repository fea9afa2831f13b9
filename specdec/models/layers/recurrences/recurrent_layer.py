"""Base of the layers that have a recurrence in place of attention, and where they read weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdec.kernels.backend import recurrence_kernels
from specdec.kernels.reference.recurrent.recurrence import InputConvolution, LayerStates
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.layers.linear import ColumnParallelLinear, RowParallelLinear, WeightPart
from specdec.models.weights.checkpoint import CheckpointReader


@dataclass(frozen=True)
class LayerSource:
    """The weights of one layer, of which a rank reads those of its units, heads or channels.

    prefix: of the names of the layer's tensors. own: units of the rank.
    """

    reader: CheckpointReader
    prefix: str
    own: range
    group: TensorParallelGroup
    hidden_size: int
    norm_eps: float

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: range | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Read some rows of a tensor."""
        return self.reader.read(f"{self.prefix}.{name}", shape, rows=rows, dtype=dtype)

    def rates(self, name: str, *shape: int, rows: range | None = None) -> Tensor:
        """Read some rows of a tensor of rates or biases of steps, in float32."""
        return self.read(name, shape, rows, torch.float32)

    def convolution(
        self,
        name: str,
        shape: tuple[int, int],
        parts: Sequence[range],
        *,
        has_bias: bool = False,
        first: int = 0,
        activates: bool = True,
    ) -> InputConvolution:
        """Read a causal convolution. shape: (channels, size). parts: of the channels, in order.

        first, activates: see InputConvolution.
        """
        channels, size = shape
        weights = [self.read(f"{name}.weight", (channels, 1, size), rows) for rows in parts]
        biases = [self.read(f"{name}.bias", (channels,), rows) for rows in parts if has_bias]
        bias = torch.cat(biases) if has_bias else None
        return InputConvolution(torch.cat(weights).squeeze(1), bias, first, activates)

    def input_projection(self, parts: list[WeightPart]) -> ColumnParallelLinear:
        """Read the projection of hidden states; the names of its parts have the prefix."""
        return ColumnParallelLinear(self.reader, self.hidden_size, parts)

    def output_projection(
        self, name: str, num_columns: int, columns: range, *, has_bias: bool = False
    ) -> RowParallelLinear:
        """Read the columns of the projection to hidden states."""
        return RowParallelLinear(
            self.reader,
            f"{self.prefix}.{name}",
            (self.hidden_size, num_columns),
            columns,
            self.group,
            has_bias=has_bias,
        )


class RecurrentLayer(nn.Module):
    """A recurrence of this rank's units in place of attention."""

    in_proj: ColumnParallelLinear
    convolution: InputConvolution
    out_proj: RowParallelLinear

    def __init__(self, source: LayerSource) -> None:
        super().__init__()
        self.kernels = recurrence_kernels(source.reader.backend)

    def forward(
        self,
        x: Tensor,  # [T, hidden_size]
        residual: Tensor | None,  # [T, hidden_size]
        states: LayerStates,
    ) -> Tensor:
        """Return [T, hidden_size], plus the residual if given."""
        output: Tensor = self.out_proj(self.run(x, states), residual)
        return output

    @abstractmethod
    def run(self, x: Tensor, states: LayerStates) -> Tensor:
        """Return what `out_proj` takes, [T, its local columns] in the type of x.

        x: [T, hidden_size], of the tokens of a pass.
        """
