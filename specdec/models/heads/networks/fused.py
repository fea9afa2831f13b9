"""EAGLE-1, EAGLE-2 and MTP layers: x = W [norm(embedding); norm(feature)] + b, then layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdec.models.heads.formats.fused import FusedShape
from specdec.models.heads.networks.layers import (
    LayerPass,
    UnnormalizedLayer,
    decoder_layer,
)
from specdec.models.heads.networks.projection import SharedInputLinear
from specdec.models.heads.networks.recurrent import RecurrentHead
from specdec.models.heads.networks.target import TargetRank
from specdec.models.layers.norm import RMSNorm
from specdec.models.weights.checkpoint import CheckpointReader


class FusedHead(RecurrentHead):
    """One rank of a head of FusedShape."""

    def __init__(self, shape: FusedShape, reader: CheckpointReader, target: TargetRank) -> None:
        super().__init__(shape, reader, target)
        hidden, eps = shape.decoder.hidden_size, shape.decoder.rms_norm_eps
        self.is_feature_first = shape.is_feature_first
        self.token_norm: nn.Module = nn.Identity()
        self.feature_norm: nn.Module = nn.Identity()
        if shape.normalizes_inputs:
            self.token_norm = RMSNorm(reader, "token_norm.weight", hidden, eps)
            self.feature_norm = RMSNorm(reader, "feature_norm.weight", hidden, eps)
        self.fc = SharedInputLinear(
            reader, "fc", (hidden, 2 * hidden), target.group, has_bias=shape.has_bias
        )
        self.layers = nn.ModuleList(_layers(shape, reader, target))

    def run(
        self, embedded: Tensor, features: Tensor, layer_pass: LayerPass, kv_cache: Tensor
    ) -> Tensor:
        """See RecurrentHead."""
        parts = [self.token_norm(embedded), self.feature_norm(features)]
        x = self.fc(torch.cat(parts[::-1] if self.is_feature_first else parts, dim=1))
        return self.attention.run_layers(self.layers, x, layer_pass, kv_cache, 0)


def _layers(shape: FusedShape, reader: CheckpointReader, target: TargetRank) -> list[nn.Module]:
    return [
        decoder_layer(shape.decoder, reader, index, target)
        if index > 0 or shape.has_first_norm
        else UnnormalizedLayer(shape.decoder, reader, f"layers.{index}", target)
        for index in range(shape.decoder.num_layers)
    ]
