"""The short convolution of LFM2 (arXiv 2511.23404, section 2) in torch."""

from __future__ import annotations

from torch import Tensor, nn

from specdec.kernels.recurrence import recurrence_kernels
from specdec.kernels.reference.recurrent.recurrence import AnyStatePlan, InputConvolution
from specdec.kernels.reference.state_pool import StatePool
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.recurrent import ShortConvolution
from specdec.models.layers.linear import ColumnParallelLinear, RowParallelLinear, weight_parts
from specdec.models.weights.checkpoint import CheckpointReader


class ShortConvolutionLayer(nn.Module):
    """Convolution of this rank's channels, multiplied by a gate before it and by one after it."""

    def __init__(
        self,
        config: ShortConvolution,
        hidden_size: int,
        reader: CheckpointReader,
        prefix: str,
        own: range,
        group: TensorParallelGroup,
    ) -> None:
        """Read the weights of own channels."""
        super().__init__()
        sizes, rows = [config.num_channels] * 3, [own] * 3
        parts = weight_parts(prefix, ("in_proj",), sizes, rows, has_bias=config.has_bias)
        self.in_proj = ColumnParallelLinear(reader, hidden_size, parts)
        shape = (config.num_channels, 1, config.kernel_size)
        self.conv = reader.read(f"{prefix}.conv.weight", shape, rows=own).squeeze(1).clone()
        self.conv_bias: Tensor | None = None
        if config.has_bias:
            self.conv_bias = reader.read(f"{prefix}.conv.bias", shape[:1], rows=own)
        self.kernels = recurrence_kernels(reader.backend)
        self.convolution = InputConvolution(self.conv, self.conv_bias, activates=False)
        out_shape = (hidden_size, config.num_channels)
        self.out_proj = RowParallelLinear(
            reader, f"{prefix}.out_proj", out_shape, own, group, has_bias=config.has_bias
        )

    def forward(
        self,
        x: Tensor,  # [T, hidden_size]
        residual: Tensor | None,  # [T, hidden_size]
        states: StatePool,
        layer: int,
        plan: AnyStatePlan,
    ) -> Tensor:
        """Return [T, hidden_size], plus the residual if given. layer: its index in the pool."""
        gate, output_gate, values = self.in_proj(x).chunk(3, -1)
        mixed = self.kernels.convolve(gate * values, self.convolution, states, layer, plan)
        output: Tensor = self.out_proj(output_gate * plan.of_tokens(mixed).to(x.dtype), residual)
        return output
