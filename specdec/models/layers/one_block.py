"""A layer that is attention, a recurrence, an MLP or a mixture alone (Nemotron-H)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.layers.decoder_layer import read_attention, read_mlp
from specdec.models.layers.norm import read_norm
from specdec.models.layers.recurrences.recurrent import read_recurrent_layer
from specdec.models.weights.checkpoint import CheckpointReader


class OneBlock(nn.Module):
    """One block with a norm before it and a residual connection."""

    def __init__(
        self,
        config: ModelConfig,
        reader: CheckpointReader,
        prefix: str,
        group: TensorParallelGroup,
        index: int,
    ) -> None:
        """Read the block of layer `index`. prefix: of its tensors."""
        super().__init__()
        name, size, eps = config.traits.names.input_norm, config.hidden_size, config.rms_norm_eps
        self.norm = read_norm(reader, f"{prefix}.{name}", size, eps, config.traits)
        recurrent = config.recurrent
        assert recurrent is not None, "only hybrids have such layers"
        self.block: nn.Module
        if index in recurrent.layers:
            self.block = read_recurrent_layer(config, reader, prefix, group)
        elif recurrent.has_mlp(index):
            self.block = read_mlp(config, reader, prefix, group, index)
        else:
            self.block = read_attention(config, reader, prefix, group, index)

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        """Return [T, hidden_size]; x: the same shape.

        context: what the block takes after the residual.
        """
        output: Tensor = self.block(self.norm(x), x, *context)
        return output
