"""The feed-forward layers of decoders in torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from specdec.kernels.reference.experts import clamped_swiglu
from specdec.kernels.rows import row_kernels
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.config.traits import Activation
from specdec.models.layers.linear import ColumnParallelLinear, RowParallelLinear, weight_parts
from specdec.models.layers.matrix import FullMatrix
from specdec.models.weights.checkpoint import CheckpointReader


class MLP(nn.Module):
    """The feed-forward layer: SwiGLU (Shazeer 2020), or another activation, gated or not."""

    def __init__(
        self,
        config: ModelConfig,
        reader: CheckpointReader,
        prefix: str,
        group: TensorParallelGroup,
        expert_size: int | None = None,
        *,
        is_routed: bool = False,
    ) -> None:
        """expert_size: hidden units of an expert, whose results its mixture sums over the ranks.

        is_routed: whether only some tokens have the expert.
        """
        super().__init__()
        experts, traits = config.experts, config.traits
        latent = experts.latent_size if experts is not None and is_routed else None
        hidden, intermediate = latent or config.hidden_size, expert_size or config.intermediate_size
        self.has_gate, self.activation = traits.has_gate, traits.activation
        units = group.share_of(intermediate)
        has_bias = config.has_mlp_bias
        if expert_size is not None:
            has_bias = experts is not None and experts.has_bias
        num_inputs = 1 + self.has_gate  # gate, if there is one, then up projection
        sizes, rows = [intermediate] * num_inputs, [units] * num_inputs
        gate_up, down = traits.names.of_mlp(is_routed=is_routed)
        parts = weight_parts(prefix, gate_up, sizes, rows, has_bias=has_bias)
        self.gate_up_proj = ColumnParallelLinear(reader, hidden, parts)
        self._kernels = row_kernels(reader.backend)
        self.down_proj = RowParallelLinear(
            reader,
            f"{prefix}.{down}",
            (hidden, intermediate),
            units,
            group if expert_size is None else TensorParallelGroup(),
            has_bias=has_bias and group.rank == 0,
        )

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return [T, hidden_size], plus the residual if given; both inputs: [T, hidden_size]."""
        output: Tensor = self.down_proj(self._activate(self.gate_up_proj(x)), residual)
        return output

    def overwrite_residual(self) -> None:
        """Let `forward` return its result in the residual, if the matrix can do that."""
        if isinstance(self.down_proj.matrix, FullMatrix):
            self.down_proj.matrix.overwrites_base = True

    def _activate(self, units: Tensor) -> Tensor:
        """Return [T, local units]; units: [T, outputs of gate_up_proj]."""
        is_silu = self.activation is Activation.SILU
        if self.has_gate and is_silu:
            return self._kernels.silu_mul(units)
        gate, *up = units.chunk(1 + self.has_gate, dim=-1)
        if self.activation is Activation.CLAMPED_SWIGLU:
            return clamped_swiglu(gate, up[0])
        if self.activation is Activation.SQUARED_RELU:
            activated = F.relu(gate).square_()
        else:
            activated = F.silu(gate) if is_silu else F.gelu(gate, approximate="tanh")
        return activated.mul_(up[0]) if up else activated


class ScaledMLP(MLP):
    """An MLP with a gate, factors of the gate before its activation and of the result (Falcon-H1).

    It is no expert.
    """

    def __init__(
        self,
        config: ModelConfig,
        reader: CheckpointReader,
        prefix: str,
        group: TensorParallelGroup,
    ) -> None:
        """See MLP."""
        super().__init__(config, reader, prefix, group)
        self.gate_scale, self.scale = config.traits.gate_scale, config.traits.mlp_scale

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """See MLP."""
        units = self.gate_up_proj(x)
        units[:, : units.shape[1] // 2] *= self.gate_scale
        output: Tensor = self.down_proj(self._activate(units), None) * self.scale
        return output if residual is None else residual + output
