"""The state space of Mamba (Gu and Dao 2023, arXiv 2312.00752) in torch, as Jamba has it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from specdec.kernels.reference.recurrent.recurrence import LayerStates, ScanRule
from specdec.models.config.recurrent import SelectiveScan
from specdec.models.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    WeightPart,
    weight_parts,
)
from specdec.models.layers.norm import RMSNorm
from specdec.models.layers.recurrences.recurrent_layer import LayerSource, RecurrentLayer


class SelectiveScanLayer(RecurrentLayer):
    """The recurrence of this rank's channels, whose outputs are gated."""

    def __init__(self, config: SelectiveScan, source: LayerSource) -> None:
        """Read the weights of own channels."""
        super().__init__(source)
        reader, prefix, own = source.reader, source.prefix, source.own
        self.config, count, has_bias = config, config.num_channels, config.has_bias
        parts = weight_parts(prefix, ("in_proj",), [count] * 2, [own] * 2, has_bias=has_bias)
        self.in_proj = source.input_projection(parts)
        self.convolution = source.convolution(
            "conv1d", (count, config.kernel_size), [own], has_bias=config.has_conv_bias
        )
        self.x_proj = RowParallelLinear(
            reader, f"{prefix}.x_proj", (config.num_parameters, count), own, source.group
        )
        steps = WeightPart(f"{prefix}.dt_proj", count, own, has_bias=True)
        self.dt_proj = ColumnParallelLinear(reader, config.step_rank, [steps])
        self.norms = nn.ModuleList(
            RMSNorm(reader, f"{prefix}.{name}_layernorm.weight", size, source.norm_eps)
            for name, size in zip(("dt", "b", "c"), self._sizes, strict=True)
        )
        self.decay_rate = source.rates("A_log", count, config.state_dim, rows=own).exp()
        self.skip = source.rates("D", count, rows=own)
        self.rule = ScanRule(self.decay_rate, self.skip)
        self.out_proj = source.output_projection("out_proj", count, own, has_bias=has_bias)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Sizes of the latents of steps, of B and of C."""
        config = self.config
        return config.step_rank, config.state_dim, config.state_dim

    def run(self, x: Tensor, states: LayerStates) -> Tensor:
        """See RecurrentLayer."""
        rows = self.kernels.replay(x, states)
        values, gates = self.in_proj(rows).chunk(2, 1)
        mixed = self.kernels.convolve(values, self.convolution, states)
        of_values = self._project(mixed.to(x.dtype))
        found = self.kernels.run_scan(mixed, *of_values, self.rule, states)
        outputs = found * F.silu(states.plan.of_hidden(gates).float())
        return outputs.to(x.dtype)

    def _project(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return steps, B and C of values [N, channels]; a collective call."""
        parameters = self.x_proj(values, None).split(self._sizes, 1)
        latent, key, query = (
            norm(part.contiguous()) for norm, part in zip(self.norms, parameters, strict=True)
        )
        return self.dt_proj(latent), key, query
