"""Gated DeltaNet (Yang et al. 2025, arXiv 2412.06464) in torch, as Qwen3-Next has it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.kernels.reference.convolution import causal_convolution
from specdec.kernels.reference.gated_delta import DeltaInputs, run_gated_delta
from specdec.kernels.reference.state_pool import StatePlan, StatePool
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.recurrent import GatedDelta
from specdec.models.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    WeightPart,
    weight_parts,
)
from specdec.models.weights.checkpoint import CheckpointReader
from specdec.types.sharding import head_rows

_NORM_EPS = 1e-6
"""Epsilon of the norms of queries and keys, which have no weights."""


class GatedDeltaLayer(nn.Module):
    """The recurrence of this rank's key heads, whose outputs are normalized and gated by head.

    It projects to its inputs, which are shares, decays, queries, keys and values, and to the gates
    of its outputs.
    """

    def __init__(
        self,
        config: GatedDelta,
        hidden_size: int,
        norm_eps: float,
        reader: CheckpointReader,
        prefix: str,
        own: range,
        group: TensorParallelGroup,
    ) -> None:
        """Read the weights of own key heads."""
        super().__init__()
        self.config, self.num_keys, self.norm_eps = config, len(own), config.norm_eps or norm_eps
        self.num_values = len(own) * config.values_per_key
        self.keys, self.outputs = len(own) * config.key_dim, len(own) * config.unit_outputs
        self.in_proj = ColumnParallelLinear(reader, hidden_size, _parts(config, prefix, own))
        self.conv = _read_convolution(config, reader, prefix, own)
        heads, count = head_rows(own, config.values_per_key), config.num_value_heads
        self.dt_bias, self.decay_rate = (
            reader.read(f"{prefix}.{name}", (count,), rows=heads, dtype=torch.float32)
            for name in ("dt_bias", "A_log")
        )
        self.decay_rate.exp_()
        norm, output = config.output_names
        self.norm = reader.read(f"{prefix}.{norm}.weight", (config.value_dim,))
        shape = (hidden_size, count * config.value_dim)
        cols = head_rows(own, config.unit_outputs)
        self.out_proj = RowParallelLinear(reader, f"{prefix}.{output}", shape, cols, group)

    def forward(
        self,
        x: Tensor,  # [T, hidden_size]
        residual: Tensor | None,  # [T, hidden_size]
        states: StatePool,
        layer: int,
        plan: StatePlan,
    ) -> Tensor:
        """Return [T, hidden_size], plus the residual if given. layer: its index in the pool."""
        projected: Tensor = self.in_proj(x)
        inputs, gates = projected.split((2 * self.num_values + len(self.conv), self.outputs), 1)
        extended = states.extend(layer, inputs, plan)
        found = run_gated_delta(self._delta_inputs(extended, plan.taps), states.memory[layer], plan)
        outputs = self._normalize(found[plan.new_places - plan.window].to(x.dtype))
        gated = outputs.flatten(1) * F.silu(gates.float())
        output: Tensor = self.out_proj(gated.to(x.dtype), residual)
        return output

    def _delta_inputs(self, extended: Tensor, taps: Tensor | None) -> DeltaInputs:
        """Return what the recurrence needs of all but the first extended inputs of a plan."""
        config = self.config
        rates, channels = extended.split((2 * self.num_values, len(self.conv)), 1)
        mixed = F.silu(causal_convolution(channels, self.conv, None, taps))
        query, key, value = mixed.split((self.keys, self.keys, self.outputs), 1)
        share, decay = rates[config.kernel_size - 1 :].float().chunk(2, 1)
        shares = share.sigmoid()
        if config.share_scale != 1.0:
            shares *= config.share_scale
        return DeltaInputs(
            self._by_value_head(query) * config.key_dim**-0.5,
            self._by_value_head(key),
            value.unflatten(1, (self.num_values, -1)),
            -self.decay_rate * F.softplus(decay + self.dt_bias),
            shares,
        )

    def _by_value_head(self, x: Tensor) -> Tensor:
        """Return queries or keys, normalized, for each value head: [N, value heads, key_dim]."""
        heads = x.unflatten(1, (self.num_keys, -1))
        scale = torch.rsqrt(heads.square().sum(-1, keepdim=True) + _NORM_EPS)
        repeated: Tensor = (heads * scale).repeat_interleave(self.config.values_per_key, 1)
        return repeated

    def _normalize(self, x: Tensor) -> Tensor:
        """Return x [T, value heads, value_dim], normalized by head."""
        values = x.float()
        scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + self.norm_eps)
        return (values * scale).to(x.dtype) * self.norm


def _parts(config: GatedDelta, prefix: str, own: range) -> list[WeightPart]:
    """Return the projections of own key heads, in the order of GatedDeltaLayer."""
    count, unit = config.num_key_heads, config.values_per_key
    sizes = (config.key_dim, config.key_dim, config.unit_outputs)

    def part(name: str, *sizes: int) -> WeightPart:
        size = sum(sizes)
        order = _by_projection(sizes, len(own)) if len(sizes) > 1 else None
        return WeightPart(f"{prefix}.{name}", count * size, head_rows(own, size), order=order)

    if config.is_separate:
        rates = (part(name, unit) for name in ("b_proj", "a_proj"))
        inner = (part(f"{name}_proj", size) for name, size in zip("qkv", sizes, strict=True))
        return [*rates, *inner, part("g_proj", config.unit_outputs)]
    if config.is_grouped:
        return [part("in_proj_ba", unit, unit), part("in_proj_qkvz", *sizes, config.unit_outputs)]
    rows = [head_rows(own, size) for size in sizes]
    channels = weight_parts(
        prefix, ("in_proj_qkv",), [count * size for size in sizes], rows, has_bias=False
    )
    rates = (part(name, unit) for name in ("in_proj_b", "in_proj_a"))
    return [*rates, *channels, part("in_proj_z", config.unit_outputs)]


def _by_projection(sizes: Sequence[int], num_heads: int) -> tuple[int, ...]:
    """Return the rows of projections that are stored by head, by projection.

    sizes: rows of a head in each projection.
    """
    whole, starts = sum(sizes), accumulate(sizes, initial=0)
    return tuple(
        head * whole + start + row
        for start, size in zip(starts, sizes, strict=False)
        for head in range(num_heads)
        for row in range(size)
    )


def _read_convolution(
    config: GatedDelta, reader: CheckpointReader, prefix: str, own: range
) -> Tensor:
    """Return the weights of the queries, keys and values of own key heads, [channels, size]."""
    shape, start, found = (config.num_key_heads * config.unit_channels, 1), 0, list[Tensor]()
    for size in (config.key_dim, config.key_dim, config.unit_outputs):
        rows = head_rows(own, size)
        whole = (*shape, config.kernel_size)
        of_all = range(start + rows.start, start + rows.stop)
        found.append(reader.read(f"{prefix}.conv1d.weight", whole, rows=of_all).squeeze(1))
        start += config.num_key_heads * size
    return torch.cat(found)
