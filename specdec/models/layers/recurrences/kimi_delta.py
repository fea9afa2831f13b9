"""Kimi Delta Attention (Kimi Linear, arXiv 2510.26692, section 3) in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.kernels.reference.convolution import causal_convolution
from specdec.kernels.reference.gated_delta import DeltaInputs, run_gated_delta
from specdec.kernels.reference.state_pool import StatePlan, StatePool
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.recurrent import KimiDelta
from specdec.models.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    WeightPart,
)
from specdec.models.weights.checkpoint import CheckpointReader
from specdec.types.sharding import head_rows

_NORM_EPS = 1e-6
"""Epsilon of the norms of queries and keys, which have no weights."""


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
        self.config, self.num_heads, self.norm_eps = config, len(own), norm_eps
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
        self.decay_rate = found[0, 0, own.start : own.stop].exp()  # [heads, 1]
        bias = reader.read(f"{prefix}.dt_bias", (values,), rows=rows, dtype=torch.float32)
        self.dt_bias = bias.view(len(own), dim)
        self.norm = reader.read(f"{prefix}.o_norm.weight", (dim,))
        name, shape = f"{prefix}.o_proj", (hidden_size, values)
        self.out_proj = RowParallelLinear(reader, name, shape, rows, group)

    def forward(
        self,
        x: Tensor,  # [T, hidden_size]
        residual: Tensor | None,  # [T, hidden_size]
        states: StatePool,
        layer: int,
        plan: StatePlan,
    ) -> Tensor:
        """Return [T, hidden_size], plus the residual if given. layer: its index in the pool."""
        dim = self.config.head_dim
        sizes = (3 * self.values, dim, dim, self.num_heads)
        channels, decay, gate, share = self.in_proj(x).split(sizes, 1)
        inputs = torch.cat((channels, self.decay_proj(decay), share), 1)
        extended = states.extend(layer, inputs, plan)
        found = run_gated_delta(self._delta_inputs(extended, plan.taps), states.memory[layer], plan)
        outputs = self._normalize(found[plan.new_places - plan.window])
        gates = self._by_head(self.gate_proj(gate)).float().sigmoid()
        output: Tensor = self.out_proj((outputs * gates).to(x.dtype).flatten(1), residual)
        return output

    def _delta_inputs(self, extended: Tensor, taps: Tensor | None) -> DeltaInputs:
        """Return what the recurrence needs of all but the first extended inputs of a plan."""
        config = self.config
        sizes = (len(self.conv), self.values, self.num_heads)
        channels, decay, share = extended.split(sizes, 1)
        mixed = F.silu(causal_convolution(channels, self.conv, None, taps))
        query, key, value = (self._by_head(part) for part in mixed.chunk(3, 1))
        steps = self._by_head(decay[config.kernel_size - 1 :]).float() + self.dt_bias
        return DeltaInputs(
            _normalized(query) * config.head_dim**-0.5,
            _normalized(key),
            value,
            -self.decay_rate * F.softplus(steps),
            share[config.kernel_size - 1 :].float().sigmoid(),
        )

    def _by_head(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(1, (self.num_heads, -1))
        return heads

    def _normalize(self, x: Tensor) -> Tensor:
        """Return x [T, heads, head_dim], normalized by head, in float32."""
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.norm_eps)
        return x * scale * self.norm.float()


def _normalized(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _NORM_EPS)


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
