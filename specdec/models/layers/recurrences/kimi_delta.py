"""Kimi Delta Attention (Kimi Linear, arXiv 2510.26692, section 3) in torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdec.kernels.recurrence import recurrence_kernels
from specdec.kernels.reference.recurrent.recurrence import (
    AnyStatePlan,
    DeltaRule,
    HeadNorm,
    InputConvolution,
)
from specdec.kernels.reference.state_pool import StatePool
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.recurrent import KimiDelta
from specdec.models.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    WeightPart,
)
from specdec.models.weights.checkpoint import CheckpointReader
from specdec.types.sharding import head_rows


class KimiDeltaLayer(nn.Module):
    """The recurrence of this rank's heads, whose outputs are normalized and gated by head."""

    def __init__(
        self,
        config: KimiDelta,
        hidden_size: int,
        norm_eps: float,
        reader: CheckpointReader,
        prefix: str,
        own: range,
        group: TensorParallelGroup,
    ) -> None:
        """Read the weights of own heads, and the projections to the latents of decays and gates."""
        super().__init__()
        self.config, self.num_heads = config, len(own)
        dim, rows = config.head_dim, head_rows(own, config.head_dim)
        values, self.values = config.num_heads * dim, len(rows)
        parts = [WeightPart(f"{prefix}.{part}_proj", values, rows) for part in "qkv"]
        parts += [WeightPart(f"{prefix}.{part}_a_proj", dim, range(dim)) for part in "fg"]
        parts.append(WeightPart(f"{prefix}.b_proj", config.num_heads, own))
        self.in_proj = ColumnParallelLinear(reader, hidden_size, parts)
        self.decay_proj, self.gate_proj = (
            ColumnParallelLinear(reader, dim, [WeightPart(f"{prefix}.{part}_b_proj", values, rows)])
            for part in "fg"
        )
        self.conv = _read_convolution(config, reader, prefix, rows)
        rates = (1, 1, config.num_heads, 1)
        found = reader.read(f"{prefix}.A_log", rates, dtype=torch.float32)
        self.decay_rate = found[0, 0, own.start : own.stop, 0].exp()  # [heads]
        bias = reader.read(f"{prefix}.dt_bias", (values,), rows=rows, dtype=torch.float32)
        self.dt_bias = bias.view(len(own), dim)
        self.norm = reader.read(f"{prefix}.o_norm.weight", (dim,))
        self.kernels = recurrence_kernels(reader.backend)
        self.convolution, self.rule = InputConvolution(self.conv, None), self._rule()
        self.head_norm = HeadNorm(self.norm, norm_eps, rounds=False, is_silu=False)
        name, shape = f"{prefix}.o_proj", (hidden_size, values)
        self.out_proj = RowParallelLinear(reader, name, shape, rows, group)

    def forward(
        self,
        x: Tensor,  # [T, hidden_size]
        residual: Tensor | None,  # [T, hidden_size]
        states: StatePool,
        layer: int,
        plan: AnyStatePlan,
    ) -> Tensor:
        """Return [T, hidden_size], plus the residual if given. layer: its index in the pool."""
        dim = self.config.head_dim
        sizes = (3 * self.values, dim, dim, self.num_heads)
        channels, decay, gate, share = self.in_proj(x).split(sizes, 1)
        inputs = torch.cat((channels, self.decay_proj(decay), share), 1)
        mixed = self.kernels.convolve(inputs, self.convolution, states, layer, plan)
        found = self.kernels.run_delta(mixed, self.rule, states, layer, plan)
        gated = self.kernels.gate_heads(found, self.gate_proj(gate), self.head_norm)
        output: Tensor = self.out_proj(gated, residual)
        return output

    def _rule(self) -> DeltaRule:
        """Return the rule of mixed inputs: queries, keys, values, decays, then shares."""
        dim, size = self.config.head_dim, self.values
        return DeltaRule(
            num_keys=self.num_heads,
            heads_per_key=1,
            key_dim=dim,
            value_dim=dim,
            query=0,
            key=size,
            value=2 * size,
            decay=3 * size,
            share=4 * size,
            rate=self.decay_rate,
            bias=self.dt_bias,
            query_scale=dim**-0.5,
        )


def _read_convolution(
    config: KimiDelta, reader: CheckpointReader, prefix: str, rows: range
) -> Tensor:
    """Return the weights of the queries, keys and values in `rows`, [channels, size]."""
    values = config.num_heads * config.head_dim
    shape, found = (3 * values, 1, config.kernel_size), list[Tensor]()
    for start in (0, values, 2 * values):
        own = range(start + rows.start, start + rows.stop)
        found.append(reader.read(f"{prefix}.conv1d.weight", shape, rows=own).squeeze(1))
    return torch.cat(found)
