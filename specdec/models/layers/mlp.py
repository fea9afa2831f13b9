"""The feed-forward layers of decoders in torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.kernels.backend import row_kernels
from specdec.kernels.reference.experts import clamped_swiglu
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.config.traits import XIELU_PREFIX, Activation
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
        self._traits = traits
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
        is_xielu = self.activation is Activation.XIELU
        self.xielu = _read_xielu(reader, prefix) if is_xielu else None
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
        activated = self._of_one(gate)
        return activated.mul_(up[0]) if up else activated

    def _of_one(self, x: Tensor) -> Tensor:
        """Return the activation function of each number of x."""
        match self.activation:
            case Activation.SILU:
                return F.silu(x)
            case Activation.RELU2:
                return F.relu(x).square_()
            case Activation.XIELU:
                assert self.xielu is not None
                return _xielu(x, self.xielu)
            case _:
                return F.gelu(x, approximate="tanh")


class ScaledMLP(MLP):
    """An MLP with a gate, factors of the gate before its activation and of the result (Falcon-H1).

    It is no expert.
    """

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """See MLP."""
        units = self.gate_up_proj(x)
        units[:, : units.shape[1] // 2] *= self._traits.gate_scale
        output: Tensor = self.down_proj(self._activate(units), None) * self._traits.mlp_scale
        return output if residual is None else residual + output


class XieluNumbers(NamedTuple):
    """The trained numbers of xIELU in a layer, as its formula has them."""

    alpha_p: float
    alpha_n: float
    beta: float
    eps: float


def _read_xielu(reader: CheckpointReader, prefix: str) -> XieluNumbers:
    """Read the numbers; files have the inverse of softplus of alpha_p, and of alpha_n less beta."""

    def read(name: str, *shape: int) -> Tensor:
        return reader.read(f"{prefix}.{XIELU_PREFIX}.{name}", shape, dtype=torch.float32)

    alpha_p, alpha_n = (float(F.softplus(read(name, 1))) for name in ("alpha_p", "alpha_n"))
    beta = float(read("beta"))
    return XieluNumbers(alpha_p, beta + alpha_n, beta, float(read("eps")))


def _xielu(x: Tensor, numbers: XieluNumbers) -> Tensor:
    """Return xIELU (Huang and Schlag, arXiv 2411.13010) of each number of x."""
    alpha_p, alpha_n, beta, eps = numbers
    negative = (torch.expm1(x.clamp(max=eps)) - x) * alpha_n
    return torch.where(x > 0, alpha_p * x * x, negative) + beta * x
