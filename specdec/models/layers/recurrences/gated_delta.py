"""Gated DeltaNet (Yang et al. 2025, arXiv 2412.06464) in torch, as Qwen3-Next has it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

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
from specdec.models.config.recurrent import GatedDelta
from specdec.models.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    WeightPart,
    weight_parts,
)
from specdec.models.weights.checkpoint import CheckpointReader
from specdec.types.sharding import head_rows


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
        self.num_values = len(own) * config.values_per_key
        self.outputs = len(own) * config.unit_outputs
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
        self.kernels = recurrence_kernels(reader.backend)
        self.convolution = InputConvolution(self.conv, None, first=2 * self.num_values)
        self.rule = self._rule(config, len(own))
        eps = config.norm_eps or norm_eps
        self.head_norm = HeadNorm(self.norm, eps, rounds=True, is_silu=True)
        shape = (hidden_size, count * config.value_dim)
        cols = head_rows(own, config.unit_outputs)
        self.out_proj = RowParallelLinear(reader, f"{prefix}.{output}", shape, cols, group)

    def forward(
        self,
        x: Tensor,  # [T, hidden_size]
        residual: Tensor | None,  # [T, hidden_size]
        states: StatePool,
        layer: int,
        plan: AnyStatePlan,
    ) -> Tensor:
        """Return [T, hidden_size], plus the residual if given. layer: its index in the pool."""
        projected: Tensor = self.in_proj(x)
        inputs, gates = projected.split((2 * self.num_values + len(self.conv), self.outputs), 1)
        mixed = self.kernels.convolve(inputs, self.convolution, states, layer, plan)
        found = self.kernels.run_delta(mixed, self.rule, states, layer, plan)
        gated = self.kernels.gate_heads(found, gates, self.head_norm)
        output: Tensor = self.out_proj(gated, residual)
        return output

    def _rule(self, config: GatedDelta, num_keys: int) -> DeltaRule:
        """Return the rule of mixed inputs: shares, decays, then queries, keys and values."""
        channels, keys = 2 * self.num_values, num_keys * config.key_dim
        return DeltaRule(
            num_keys=num_keys,
            heads_per_key=config.values_per_key,
            key_dim=config.key_dim,
            value_dim=config.value_dim,
            query=channels,
            key=channels + keys,
            value=channels + 2 * keys,
            decay=self.num_values,
            share=0,
            rate=self.decay_rate,
            bias=self.dt_bias,
            query_scale=config.key_dim**-0.5,
            share_scale=config.share_scale,
        )


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
