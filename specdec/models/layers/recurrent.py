"""The recurrent layers of one rank, by their kind."""

from __future__ import annotations

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.config.recurrent import GatedDelta, ShortConvolution, StateSpace
from specdec.models.layers.gated_delta import GatedDeltaLayer
from specdec.models.layers.short_convolution import ShortConvolutionLayer
from specdec.models.layers.state_space import StateSpaceLayer
from specdec.models.weights.checkpoint import CheckpointReader

RecurrentLayer = ShortConvolutionLayer | GatedDeltaLayer | StateSpaceLayer
"""A recurrence in place of attention."""


def read_recurrent_layer(
    config: ModelConfig, reader: CheckpointReader, prefix: str, group: TensorParallelGroup
) -> RecurrentLayer:
    """Read the recurrence of a layer. prefix: of the layer's tensors."""
    recurrent, hidden_size = config.recurrent, config.hidden_size
    assert recurrent is not None, "the model has no recurrent layers"
    kind, own = recurrent.kind, recurrent.units(group.rank, group.size)
    name = f"{prefix}.{kind.prefix}"
    match kind:
        case GatedDelta():
            eps = config.rms_norm_eps
            return GatedDeltaLayer(kind, hidden_size, eps, reader, name, own, group)
        case StateSpace():
            eps = config.rms_norm_eps
            return StateSpaceLayer(kind, hidden_size, eps, reader, name, own, group)
        case ShortConvolution():
            return ShortConvolutionLayer(kind, hidden_size, reader, name, own, group)
