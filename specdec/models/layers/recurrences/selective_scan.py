"""The state space of Mamba (Gu and Dao 2023, arXiv 2312.00752) in torch, as Jamba has it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.kernels.recurrence import recurrence_kernels
from specdec.kernels.reference.recurrent.recurrence import AnyStatePlan, InputConvolution, ScanRule
from specdec.kernels.reference.state_pool import StatePool
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.recurrent import SelectiveScan
from specdec.models.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    WeightPart,
    weight_parts,
)
from specdec.models.layers.norm import RMSNorm
from specdec.models.weights.checkpoint import CheckpointReader


class SelectiveScanLayer(nn.Module):
    """The recurrence of this rank's channels, whose outputs are gated."""

    def __init__(
        self,
        config: SelectiveScan,
        hidden_size: int,
        norm_eps: float,
        reader: CheckpointReader,
        prefix: str,
        own: range,
        group: TensorParallelGroup,
    ) -> None:
        """Read the weights of own channels."""
        super().__init__()
        self.config, channels, rank = config, config.num_channels, config.step_rank
        parts = weight_parts(
            prefix, ("in_proj",), [channels] * 2, [own] * 2, has_bias=config.has_bias
        )
        self.in_proj = ColumnParallelLinear(reader, hidden_size, parts)
        self._read_convolution(reader, f"{prefix}.conv1d", own)
        self.x_proj = RowParallelLinear(
            reader, f"{prefix}.x_proj", (config.num_parameters, channels), own, group
        )
        steps = WeightPart(f"{prefix}.dt_proj", channels, own, has_bias=True)
        self.dt_proj = ColumnParallelLinear(reader, rank, [steps])
        self.norms = nn.ModuleList(
            RMSNorm(reader, f"{prefix}.{name}_layernorm.weight", size, norm_eps)
            for name, size in zip(("dt", "b", "c"), self._sizes, strict=True)
        )
        rates = (channels, config.state_dim)
        self.decay_rate = reader.read(f"{prefix}.A_log", rates, rows=own, dtype=torch.float32).exp()
        self.skip = reader.read(f"{prefix}.D", rates[:1], rows=own, dtype=torch.float32)
        self.kernels = recurrence_kernels(reader.backend)
        self.convolution = InputConvolution(self.conv, self.conv_bias)
        self.rule, shape = ScanRule(self.decay_rate, self.skip), (hidden_size, channels)
        self.out_proj = RowParallelLinear(
            reader, f"{prefix}.out_proj", shape, own, group, has_bias=config.has_bias
        )

    def _read_convolution(self, reader: CheckpointReader, name: str, own: range) -> None:
        config = self.config
        shape = (config.num_channels, 1, config.kernel_size)
        self.conv = reader.read(f"{name}.weight", shape, rows=own).squeeze(1).clone()
        self.conv_bias: Tensor | None = None
        if config.has_conv_bias:
            self.conv_bias = reader.read(f"{name}.bias", shape[:1], rows=own)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Sizes of the latents of steps, of B and of C."""
        config = self.config
        return config.step_rank, config.state_dim, config.state_dim

    def forward(
        self,
        x: Tensor,  # [T, hidden_size]
        residual: Tensor | None,  # [T, hidden_size]
        states: StatePool,
        layer: int,
        plan: AnyStatePlan,
    ) -> Tensor:
        """Return [T, hidden_size], plus the residual if given. layer: its index in the pool."""
        rows = self.kernels.replay(x, states, layer, plan)
        values, gates = self.in_proj(rows).chunk(2, 1)
        mixed = self.kernels.convolve(values, self.convolution, states, layer, plan)
        of_values = self._project(mixed.to(x.dtype))
        found = self.kernels.run_scan(mixed, *of_values, self.rule, states, layer, plan)
        outputs = found * F.silu(plan.of_hidden(gates).float())
        output: Tensor = self.out_proj(outputs.to(x.dtype), residual)
        return output

    def _project(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return steps, B and C of values [N, channels]; a collective call."""
        parameters = self.x_proj(values, None).split(self._sizes, 1)
        latent, key, query = (
            norm(part.contiguous()) for norm, part in zip(self.norms, parameters, strict=True)
        )
        return self.dt_proj(latent), key, query
