"""Decoder layers of a head over its paged KV, in torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdec.kernels import AttentionPlan, PagedAttention, Rotation
from specdec.kernels.reference.attention import Visible
from specdec.kernels.reference.device_batch import AnyDeviceBatch
from specdec.kernels.reference.forward_batch import AdapterRun, ForwardBatch, on_device
from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.formats.shape import KvShape
from specdec.models.heads.networks.adapted import AdaptedNetwork
from specdec.models.heads.networks.base import FIRST_SLOT
from specdec.models.heads.networks.target import TargetRank
from specdec.models.heads.networks.vocabulary import (
    read_embedding,
    read_lm_head,
    read_target_ids,
)
from specdec.models.layers.decoder_layer import Attention, DecoderLayer, layer_attention
from specdec.models.layers.mlp import MLP
from specdec.models.layers.norm import RMSNorm
from specdec.models.layers.rotary import RotaryEmbedding
from specdec.models.weights.checkpoint import CheckpointReader


@dataclass(frozen=True)
class LayerPass:
    """Values that all layers of one forward pass share. plans: by window."""

    rotation: Rotation
    attention: PagedAttention
    plans: Mapping[int | None, AttentionPlan]


class HeadAttention:
    """Rotary embedding and paged attention of a head's layers, on this rank."""

    def __init__(self, decoder: ModelConfig, target: TargetRank) -> None:
        self.config = decoder
        self.windows = decoder.sliding_windows
        self.heads = decoder.head_shards(target.group.size)[target.group.rank]
        self.head_dim = decoder.head_dim
        self.dtype, self.device = target.dtype, target.device
        self.paged = layer_attention(
            decoder, self.heads, target.backend, target.block_size, target.device
        )
        self.rotary = RotaryEmbedding(
            decoder.rotary_dim, target.max_positions, decoder.rope, target.dtype, target.device
        )

    def new_kv_cache(self, num_slots: int) -> Tensor:
        """Return zeros [num_layers, num_slots, kv_parts, this rank's KV heads, head_dim]."""
        of_pair = (self.paged.kv_parts, len(self.heads.kv), self.head_dim)
        shape = (len(self.windows), num_slots, *of_pair)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def begin_pass(self, batch: ForwardBatch) -> LayerPass:
        """Plan a forward pass. The rotary position of a pair is that of its token."""
        plans = {
            window: self.paged.plan(batch, self.dtype, Visible(window, FIRST_SLOT))
            for window in set(self.windows)
        }
        rotation = self.rotary.rotation(on_device(batch.positions, self.device))
        return LayerPass(rotation, self.paged, plans)

    def begin_device_pass(self, batch: AnyDeviceBatch) -> LayerPass:
        """Plan a pass of fixed shape as `begin_pass`, without a value that the host reads."""
        plans = {
            window: self.paged.plan_on_device(batch, self.dtype, Visible(window, FIRST_SLOT))
            for window in set(self.windows)
        }
        return LayerPass(self.rotary.rotation(batch.positions), self.paged, plans)

    def run_layers(
        self, layers: Iterable[nn.Module], x: Tensor, run: LayerPass, kv_cache: Tensor, first: int
    ) -> Tensor:
        """Run ordinary layers, the first of which has index `first`; x: [T, hidden_size]."""
        for index, layer in enumerate(layers, first):
            plan = run.plans[self.windows[index]]
            x = layer(x, run.rotation, kv_cache[index], run.attention, plan)
        return x


class KvHead(AdaptedNetwork):
    """The parts of a head with attention that do not depend on how it drafts; see DraftHead."""

    reads_drafts: bool

    def __init__(self, shape: KvShape, reader: CheckpointReader, target: TargetRank) -> None:
        super().__init__()
        decoder, num_tokens = shape.decoder, shape.draft_vocab_size
        hidden = decoder.hidden_size
        self.taps, self.feature_size = shape.taps, shape.feature_size
        self.num_kv_layers, self.max_draft_tokens = decoder.num_layers, shape.max_draft_tokens
        self.vocab_size, self.vocab_slice = num_tokens, target.group.share_of(num_tokens)
        self.target_ids = read_target_ids(
            reader, target.config.vocab_size, is_reduced=shape.has_draft_ids
        )
        self.attention = HeadAttention(decoder, target)
        self.embed_tokens = read_embedding(reader, hidden, target, is_own=shape.has_embedding)
        head_shape = (num_tokens, hidden)
        self.lm_head = read_lm_head(reader, head_shape, target, is_own=shape.has_lm_head)

    @property
    def device(self) -> torch.device:
        return self.attention.device

    @property
    def output_size(self) -> int:
        """See DeviceKvHead."""
        return self.feature_size

    def new_kv_cache(self, num_slots: int) -> Tensor:
        """See DraftHead."""
        return self.attention.new_kv_cache(num_slots)

    def features(self, states: Tensor, runs: Sequence[AdapterRun] = ()) -> Tensor:
        """Return the final hidden states: heads that read other layers override this."""
        del runs
        return states.to(self.attention.dtype)


class UnnormalizedLayer(nn.Module):
    """A decoder layer without a norm before attention: the first one of EAGLE-1."""

    def __init__(
        self, decoder: ModelConfig, reader: CheckpointReader, prefix: str, target: TargetRank
    ) -> None:
        super().__init__()
        self.mixer = Attention(decoder, reader, f"{prefix}.self_attn", target.group)
        name = f"{prefix}.post_attention_layernorm.weight"
        self.mlp_norm = RMSNorm(reader, name, decoder.hidden_size, decoder.rms_norm_eps)
        self.mlp = MLP(decoder, reader, f"{prefix}.mlp", target.group)

    def forward(
        self,
        x: Tensor,  # [T, hidden_size]
        rotation: Rotation,
        kv_cache: Tensor,
        attention: PagedAttention,
        plan: AttentionPlan,
    ) -> Tensor:
        """Return [T, hidden_size]."""
        x = self.mixer(x, x, rotation, kv_cache, attention, plan)
        output: Tensor = self.mlp(self.mlp_norm(x), x)
        return output


def decoder_layer(
    decoder: ModelConfig, reader: CheckpointReader, index: int, target: TargetRank
) -> DecoderLayer:
    """Read an ordinary layer."""
    return DecoderLayer(decoder, reader, f"layers.{index}", target.group, index)
