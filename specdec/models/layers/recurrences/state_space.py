"""The state space of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060) in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.reference.recurrent.recurrence import DeltaRule, LayerStates
from specdec.models.config.recurrent import StateSpace
from specdec.models.layers.linear import WeightPart, weight_parts
from specdec.models.layers.recurrences.recurrent_layer import LayerSource, RecurrentLayer
from specdec.models.weights.checkpoint import CheckpointReader
from specdec.types.sharding import head_rows


class StateSpaceLayer(RecurrentLayer):
    """The recurrence of this rank's heads, whose outputs are gated and normalized by group."""

    def __init__(self, config: StateSpace, source: LayerSource) -> None:
        """Read the weights of own heads, and those of B and C of all groups."""
        super().__init__(source)
        own, reader = source.own, source.reader
        self.config, self.num_heads, self.group = config, len(own), source.group
        self.norm_eps, self.values = source.norm_eps, len(own) * config.head_dim
        num_values, rows = config.num_heads * config.head_dim, head_rows(own, config.head_dim)
        self.in_proj = source.input_projection(_parts(config, source.prefix, rows, own))
        channels = num_values + 2 * config.group_channels
        self.convolution = source.convolution(
            "conv1d",
            (channels, config.kernel_size),
            [rows, range(num_values, channels)],
            has_bias=config.has_conv_bias,
        )
        self.decay_rate, self.skip, self.dt_bias = (
            source.rates(name, config.num_heads, rows=own) for name in ("A_log", "D", "dt_bias")
        )
        self.decay_rate.exp_()
        self.norm: Tensor | None = None
        if config.has_norm:
            self.norm = source.read("norm.weight", (num_values,), rows)
        self.scales = self._scales(reader) if set(config.scales) != {1.0} else None
        per_group = config.num_heads // config.num_groups
        self.groups = torch.tensor([head // per_group for head in own], device=reader.device)
        self.rule = self._rule(config, own.start)
        self.out_proj = source.output_projection(
            "out_proj", num_values, rows, has_bias=config.has_output_bias
        )

    def _scales(self, reader: CheckpointReader) -> Tensor:
        """Return the factors of the local outputs of the input projection."""
        sizes = [self.values] * 2 + [self.config.group_channels] * 2 + [self.num_heads]
        pairs = zip(self.config.scales, sizes, strict=True)
        factors = [factor for factor, size in pairs for _ in range(size)]
        return torch.tensor(factors, dtype=reader.dtype, device=reader.device)

    def run(self, x: Tensor, states: LayerStates) -> Tensor:
        """See RecurrentLayer."""
        projected = self._project(x)
        gates, inputs = projected[:, : self.values], projected[:, self.values :]
        mixed = self.kernels.convolve(inputs, self.convolution, states)
        found = self.kernels.run_delta(mixed, self.rule, states)
        return self._normalize(found.flatten(1), gates).to(x.dtype)

    def _project(self, x: Tensor) -> Tensor:
        """Return gates, values, B, C and steps, [T, local outputs]."""
        scale = self.config.input_scale
        projected: Tensor = self.in_proj(x if scale == 1.0 else x * scale)
        return projected if self.scales is None else projected * self.scales

    def _rule(self, config: StateSpace, first_head: int) -> DeltaRule:
        """Return the rule of mixed inputs: values, keys B and queries C of groups, then steps."""
        return DeltaRule(
            num_keys=config.num_groups,
            heads_per_key=config.num_heads // config.num_groups,
            key_dim=config.state_dim,
            value_dim=config.head_dim,
            query=self.values + config.group_channels,
            key=self.values,
            value=0,
            decay=len(self.convolution.weight),
            share=None,
            rate=self.decay_rate,
            bias=self.dt_bias,
            skip=self.skip,
            first_head=first_head,
            normalizes=False,
        )

    def _normalize(self, x: Tensor, gates: Tensor) -> Tensor:
        """Return x [T, values] gated, and normalized over each group; a collective call."""
        config, activated = self.config, F.silu(gates.float())
        if self.norm is None:
            return x * activated
        gated = x if config.norms_before_gate else x * activated
        of_heads = gated.unflatten(1, (self.num_heads, -1)).square().sum(-1)
        squares = of_heads.new_zeros(len(x), config.num_groups)
        squares = self.group.all_reduce(squares.index_add_(1, self.groups, of_heads))
        size = config.num_heads // config.num_groups * config.head_dim
        scale = torch.rsqrt(squares / size + self.norm_eps)[:, self.groups]
        normed = gated.unflatten(1, (self.num_heads, -1)) * scale[..., None]
        output: Tensor = normed.flatten(1).to(self.norm.dtype) * self.norm
        return output * activated if config.norms_before_gate else output


def _parts(config: StateSpace, prefix: str, rows: range, own: range) -> list[WeightPart]:
    """Return the projections to gates and values in `rows`, B and C, and the steps of own heads."""
    values, groups = config.num_heads * config.head_dim, config.group_channels
    sizes = [values, values, groups, groups, config.num_heads]
    parts = [rows, rows, range(groups), range(groups), own]
    return weight_parts(prefix, ("in_proj",), sizes, parts, has_bias=config.has_bias)
