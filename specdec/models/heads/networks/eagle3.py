"""EAGLE-3: the first layer's attention reads the normed embedding beside the normed feature."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specdec.kernels.reference.forward_batch import AdapterRun
from specdec.models.heads.formats.eagle3 import Eagle3Shape
from specdec.models.heads.networks.layers import LayerPass, decoder_layer
from specdec.models.heads.networks.projection import SharedInputLinear
from specdec.models.heads.networks.recurrent import RecurrentHead
from specdec.models.heads.networks.target import TargetRank, concatenated
from specdec.models.layers.decoder_layer import Attention
from specdec.models.layers.mlp import MLP
from specdec.models.layers.norm import RMSNorm
from specdec.models.weights.checkpoint import CheckpointReader


class FeatureProjection(nn.Module):
    """Projects the hidden states of several layers of the target to one feature."""

    def __init__(self, shape: Eagle3Shape, reader: CheckpointReader, target: TargetRank) -> None:
        super().__init__()
        self.layers_read = shape.layers_read
        eps, size = shape.decoder.rms_norm_eps, shape.target_size
        width = shape.num_inputs * size
        self.part_norms = nn.ModuleList(
            RMSNorm(reader, f"fc_norm.{index}.weight", size, eps)
            for index in range(shape.num_inputs if shape.fc_norm else 0)
        )
        self.norm: nn.Module = nn.Identity()
        if shape.norm_before_fc:
            self.norm = RMSNorm(reader, "input_norm.weight", width, eps)
        self.fc: nn.Module = nn.Identity()
        if shape.layers_read:
            output = (shape.decoder.hidden_size, width)
            self.fc = SharedInputLinear(reader, "fc", output, target.group, has_bias=shape.has_bias)

    def forward(self, states: Tensor) -> Tensor:
        """Return features [T, feature_size].

        states: [T, target_size], or of several layers [T, len(taps), target_size].
        """
        if self.layers_read is None:
            return self.project(states.flatten(1))
        return self.project(concatenated(states, self.layers_read))

    def project(self, inputs: Tensor) -> Tensor:
        """Return features [T, feature_size] of the inputs [T, num_inputs * target_size]."""
        if self.part_norms:
            parts = inputs.chunk(len(self.part_norms), dim=1)
            normed = [norm(part) for norm, part in zip(self.part_norms, parts, strict=True)]
            inputs = torch.cat(normed, dim=1)
        features: Tensor = self.fc(self.norm(inputs))
        return features


class FirstLayer(nn.Module):
    """The layer that combines a token's embedding and the feature."""

    def __init__(self, shape: Eagle3Shape, reader: CheckpointReader, target: TargetRank) -> None:
        super().__init__()
        decoder, prefix = shape.decoder, "layers.0"
        size, eps = decoder.hidden_size, decoder.rms_norm_eps
        self.token_norm: nn.Module = nn.Identity()
        if shape.has_token_norm:
            self.token_norm = RMSNorm(reader, f"{prefix}.input_layernorm.weight", size, eps)
        self.feature_norm = RMSNorm(reader, f"{prefix}.hidden_norm.weight", size, eps)
        self.norm_before_residual = shape.norm_before_residual
        self.mixer = Attention(decoder, reader, f"{prefix}.self_attn", target.group, 2 * size)
        self.mlp_norm = RMSNorm(reader, f"{prefix}.post_attention_layernorm.weight", size, eps)
        self.mlp = MLP(decoder, reader, f"{prefix}.mlp", target.group)

    def forward(
        self,
        embedded: Tensor,  # [T, hidden_size]
        features: Tensor,  # [T, hidden_size]
        layer_pass: LayerPass,
        kv_cache: Tensor,  # [num_slots, 2, num_kv_heads, head_dim]
        window: int | None,
    ) -> Tensor:
        """Return [T, hidden_size]."""
        normed = self.feature_norm(features)
        x = self.mixer(
            torch.cat([self.token_norm(embedded), normed], dim=1),
            normed if self.norm_before_residual else features,
            layer_pass.rotation,
            kv_cache,
            layer_pass.attention,
            layer_pass.plans[window],
        )
        output: Tensor = self.mlp(self.mlp_norm(x), x)
        return output


class Eagle3Head(RecurrentHead):
    """One rank of an EAGLE-3 head."""

    def __init__(self, shape: Eagle3Shape, reader: CheckpointReader, target: TargetRank) -> None:
        super().__init__(shape, reader, target)
        decoder = shape.decoder
        self.projection = FeatureProjection(shape, reader, target)
        self.first_layer = FirstLayer(shape, reader, target)
        self.layers = nn.ModuleList(
            decoder_layer(decoder, reader, index, target) for index in range(1, decoder.num_layers)
        )

    @torch.inference_mode()
    def features(self, states: Tensor, runs: Sequence[AdapterRun] = ()) -> Tensor:
        """See DraftHead."""
        dtype = self.attention.dtype
        with self.running(runs):
            features: Tensor = self.projection(states.to(dtype))
        return features

    def run(
        self, embedded: Tensor, features: Tensor, layer_pass: LayerPass, kv_cache: Tensor
    ) -> Tensor:
        """See RecurrentHead."""
        window = self.attention.windows[0]
        x = self.first_layer(embedded, features, layer_pass, kv_cache[0], window)
        return self.attention.run_layers(self.layers, x, layer_pass, kv_cache, 1)
