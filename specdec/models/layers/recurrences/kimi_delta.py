"""Kimi Delta Attention (Kimi Linear, arXiv 2510.26692, section 3) in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.reference.recurrent.recurrence import DeltaRule, HeadNorm, LayerStates
from specdec.models.config.recurrent import KimiDelta
from specdec.models.layers.linear import ColumnParallelLinear, WeightPart
from specdec.models.layers.recurrences.recurrent_layer import LayerSource, RecurrentLayer
from specdec.types.sharding import head_rows


class KimiDeltaLayer(RecurrentLayer):
    """The recurrence of this rank's heads, whose outputs are normalized and gated by head."""

    def __init__(self, config: KimiDelta, source: LayerSource) -> None:
        """Read the weights of own heads, and the projections to the latents of decays and gates."""
        super().__init__(source)
        own, prefix, dim, count = source.own, source.prefix, config.head_dim, config.num_heads
        self.config, self.num_heads, rows = config, len(own), head_rows(own, dim)
        num_values, self.values = count * dim, len(rows)
        parts = [WeightPart(f"{prefix}.{part}_proj", num_values, rows) for part in "qkv"]
        parts += [WeightPart(f"{prefix}.{part}_a_proj", dim, range(dim)) for part in "fg"]
        parts.append(WeightPart(f"{prefix}.b_proj", count, own))
        self.in_proj = source.input_projection(parts)
        second = [WeightPart(f"{prefix}.{part}_b_proj", num_values, rows) for part in "fg"]
        self.decay_proj, self.gate_proj = (
            ColumnParallelLinear(source.reader, dim, [part]) for part in second
        )
        channels = [
            range(start + rows.start, start + rows.stop)
            for start in range(0, 3 * num_values, num_values)
        ]
        shape = (3 * num_values, config.kernel_size)
        self.convolution = source.convolution("conv1d", shape, channels)
        rates = source.rates("A_log", 1, 1, count, 1)
        self.decay_rate = rates[0, 0, own.start : own.stop, 0].exp()  # [heads]
        self.dt_bias = source.rates("dt_bias", num_values, rows=rows).view(len(own), dim)
        self.norm = source.read("o_norm.weight", (dim,))
        self.rule = self._rule()
        self.head_norm = HeadNorm(self.norm, source.norm_eps, rounds=False, is_silu=False)
        self.out_proj = source.output_projection("o_proj", num_values, rows)

    def run(self, x: Tensor, states: LayerStates) -> Tensor:
        """See RecurrentLayer."""
        dim = self.config.head_dim
        sizes = (3 * self.values, dim, dim, self.num_heads)
        channels, decay, gate, share = self.in_proj(x).split(sizes, 1)
        inputs = torch.cat((channels, self.decay_proj(decay), share), 1)
        mixed = self.kernels.convolve(inputs, self.convolution, states)
        found = self.kernels.run_delta(mixed, self.rule, states)
        return self.kernels.gate_heads(found, self.gate_proj(gate), self.head_norm)

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
