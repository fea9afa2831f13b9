"""EAGLE-1, EAGLE-2 and MTP layers: x = W [norm(embedding); norm(feature)] + b, then layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdec.models.heads.formats.fused import FusedShape
from specdec.models.heads.networks.layers import (
    HeadAttention,
    LayerPass,
    UnnormalizedLayer,
    decoder_layer,
)
from specdec.models.heads.networks.projection import SharedInputLinear
from specdec.models.heads.networks.recurrent import RecurrentHead
from specdec.models.heads.networks.target import TargetRank
from specdec.models.heads.networks.vocabulary import read_embedding, read_lm_head
from specdec.models.layers.norm import RMSNorm
from specdec.models.weights.checkpoint import CheckpointReader


class FusedHead(RecurrentHead):
    """One rank of a head of FusedShape."""

    def __init__(self, shape: FusedShape, reader: CheckpointReader, target: TargetRank) -> None:
        super().__init__()
        decoder, group = shape.decoder, target.group
        hidden, eps = decoder.hidden_size, decoder.rms_norm_eps
        self.taps, self.feature_size = shape.taps, shape.feature_size
        self.vocab_size, self.target_ids = shape.draft_vocab_size, None
        self.vocab_slice = group.share_of(shape.draft_vocab_size)
        self.attention, self.num_kv_layers = HeadAttention(decoder, target), decoder.num_layers
        self.embed_tokens = read_embedding(reader, hidden, target, is_own=shape.has_embedding)
        head_shape = (shape.draft_vocab_size, hidden)
        self.lm_head = read_lm_head(reader, head_shape, target, is_own=shape.has_lm_head)
        self.is_feature_first = shape.is_feature_first
        self.token_norm: nn.Module = nn.Identity()
        self.feature_norm: nn.Module = nn.Identity()
        if shape.normalizes_inputs:
            self.token_norm = RMSNorm(reader, "token_norm.weight", hidden, eps)
            self.feature_norm = RMSNorm(reader, "feature_norm.weight", hidden, eps)
        self.fc = SharedInputLinear(
            reader, "fc", (hidden, 2 * hidden), group, has_bias=shape.has_bias
        )
        self.layers = nn.ModuleList(_layers(shape, reader, target))
        self.norm = RMSNorm(reader, "norm.weight", hidden, eps) if shape.has_final_norm else None
        self.recycles_norm = shape.recycles_norm

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
