"""Gated DeltaNet (Yang et al. 2025, arXiv 2412.06464) in torch, as Qwen3-Next has it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from specdec.kernels.reference.recurrent.recurrence import DeltaRule, HeadNorm, LayerStates
from specdec.models.config.recurrent import GatedDelta
from specdec.models.layers.linear import WeightPart, weight_parts
from specdec.models.layers.recurrences.recurrent_layer import LayerSource, RecurrentLayer
from specdec.types.sharding import head_rows


class GatedDeltaLayer(RecurrentLayer):
    """The recurrence of this rank's key heads, whose outputs are normalized and gated by head.

    It projects to its inputs, which are shares, decays, queries, keys and values, and to the gates
    of its outputs.
    """

    def __init__(self, config: GatedDelta, source: LayerSource) -> None:
        """Read the weights of own key heads."""
        super().__init__(source)
        own, count = source.own, config.num_value_heads
        self.num_values = len(own) * config.values_per_key
        self.outputs = len(own) * config.unit_outputs
        self.in_proj = source.input_projection(_parts(config, source.prefix, own))
        shape = (config.num_key_heads * config.unit_channels, config.kernel_size)
        self.convolution = source.convolution(
            "conv1d", shape, _channels(config, own), first=2 * self.num_values
        )
        heads = head_rows(own, config.values_per_key)
        self.dt_bias = source.rates("dt_bias", count, rows=heads)
        self.decay_rate = source.rates("A_log", count, rows=heads).exp_()
        norm, output = config.output_names
        self.norm = source.read(f"{norm}.weight", (config.value_dim,))
        self.rule = self._rule(config, len(own))
        eps = config.norm_eps or source.norm_eps
        self.head_norm = HeadNorm(self.norm, eps, rounds=True, is_silu=True)
        columns = head_rows(own, config.unit_outputs)
        self.out_proj = source.output_projection(output, count * config.value_dim, columns)

    def run(self, x: Tensor, states: LayerStates) -> Tensor:
        """See RecurrentLayer."""
        projected: Tensor = self.in_proj(x)
        inputs, gates = projected.split((projected.shape[1] - self.outputs, self.outputs), 1)
        mixed = self.kernels.convolve(inputs, self.convolution, states)
        found = self.kernels.run_delta(mixed, self.rule, states)
        return self.kernels.gate_heads(found, gates, self.head_norm)

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


def _channels(config: GatedDelta, own: range) -> list[range]:
    """Return the channels of the queries, keys and values of own key heads."""
    start, found = 0, list[range]()
    for size in (config.key_dim, config.key_dim, config.unit_outputs):
        rows = head_rows(own, size)
        found.append(range(start + rows.start, start + rows.stop))
        start += config.num_key_heads * size
    return found
