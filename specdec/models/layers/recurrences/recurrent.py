"""The recurrent layers of one rank, by their kind."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.config.recurrent import (
    GatedDelta,
    KimiDelta,
    SelectiveScan,
    ShortConvolution,
    StateSpace,
)
from specdec.models.config.traits import BesideAttention
from specdec.models.layers.recurrences.gated_delta import GatedDeltaLayer
from specdec.models.layers.recurrences.kimi_delta import KimiDeltaLayer
from specdec.models.layers.recurrences.recurrent_layer import LayerSource, RecurrentLayer
from specdec.models.layers.recurrences.selective_scan import SelectiveScanLayer
from specdec.models.layers.recurrences.short_convolution import ShortConvolutionLayer
from specdec.models.layers.recurrences.state_space import StateSpaceLayer
from specdec.models.weights.checkpoint import CheckpointReader


class AttentionBesideRecurrence(nn.Module):
    """The sum of attention and a recurrence of the same hidden states (Falcon-H1)."""

    def __init__(
        self, attention: nn.Module, recurrence: RecurrentLayer, factors: BesideAttention
    ) -> None:
        super().__init__()
        self.attention, self.recurrence, self.factors = attention, recurrence, factors

    def forward(
        self,
        x: Tensor,  # [T, hidden_size]
        residual: Tensor | None,  # [T, hidden_size]
        of_attention: tuple[Any, ...],
        of_recurrence: tuple[Any, ...],
    ) -> Tensor:
        """Return [T, hidden_size], plus the residual if given.

        of_attention, of_recurrence: what each takes after the residual.
        """
        factors = self.factors
        attended = self.attention(x * factors.attention_input, None, *of_attention)
        found: Tensor = self.recurrence(x, None, *of_recurrence) * factors.recurrence_output
        found.add_(attended, alpha=factors.attention_output)
        return found if residual is None else residual + found


def read_recurrent_layer(
    config: ModelConfig, reader: CheckpointReader, prefix: str, group: TensorParallelGroup
) -> RecurrentLayer:
    """Read the recurrence of a layer. prefix: of the layer's tensors."""
    recurrent = config.recurrent
    assert recurrent is not None, "the model has no recurrent layers"
    kind, own = recurrent.kind, recurrent.units(group.rank, group.size)
    name, eps = f"{prefix}.{kind.prefix}", config.rms_norm_eps
    source = LayerSource(reader, name, own, group, config.hidden_size, eps)
    match kind:
        case GatedDelta():
            return GatedDeltaLayer(kind, source)
        case StateSpace():
            return StateSpaceLayer(kind, source)
        case KimiDelta():
            return KimiDeltaLayer(kind, source)
        case SelectiveScan():
            return SelectiveScanLayer(kind, source)
        case ShortConvolution():
            return ShortConvolutionLayer(kind, source)
