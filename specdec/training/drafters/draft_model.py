"""A small draft model: some of the target's layers between its own embedding and output head.

Depth pruning (Sun et al. 2019, Patient KD, initializes a student in the same way; Xia et al. 2023,
arXiv 2310.06694, prune and then continue training). The layers learn; embedding and output head are
the target's and stay as they are, so they need not be stored (docs/adr/0027).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.kernels import Rotation
from specdec.kernels.reference.forward_batch import HiddenStates
from specdec.models.config.model_config import ModelConfig
from specdec.models.drafters.packed_info import Base
from specdec.models.drafters.token_map import TOKEN_MAP_FILE
from specdec.models.layers.rotary import RotaryEmbedding
from specdec.training.data.batches import Batch
from specdec.training.data.config import TrainingConfig
from specdec.training.data.padding import KeyValue, PaddedTokens, is_padded
from specdec.training.data.target import Target
from specdec.training.drafters.base import Drafter, SharedParts
from specdec.training.drafters.layers import RMSNorm, rotated, rows_product

_DEFAULT_NUM_LAYERS = 3


class DraftModelDrafter(Drafter):
    """A causal decoder with the target's sizes and few of its layers.

    It sees the text alone, so draft token i of a base is draft token 0 of the base i after it.
    """

    trained_depth = 1
    draft_temperature = 1.0

    def __init__(self, target: Target, token_ids: Tensor, config: TrainingConfig) -> None:
        """See Drafter. It has no more layers than the target."""
        super().__init__(target, token_ids, config)
        model, self.taps = target.config, ()
        num_layers = min(config.num_layers or _DEFAULT_NUM_LAYERS, model.num_layers)
        self.layers = nn.ModuleList(Layer(model) for _ in range(num_layers))
        self.norm = RMSNorm(model.hidden_size, model.rms_norm_eps)
        self._rotary = RotaryEmbedding(
            model.head_dim, model.max_position_embeddings, model.rope, torch.float32, target.device
        )
        self._model, self._fields = model, {**target.layer_fields, **target.token_fields}
        base = Base(target.name, target.vocabulary_tensors, target.text_files)
        self._shared = SharedParts(base, target.directory)
        self._embedding = target.embedding.to(target.device)
        self._lm_head = target.lm_head[token_ids].to(target.device)
        self._start_from(target)

    @torch.no_grad()
    def _start_from(self, target: Target) -> None:
        kept = kept_layers(target.config.num_layers, len(self.layers))
        for layer, index in zip(self.layers, kept, strict=True):
            for name, weight in layer.named_parameters():
                stored = f"model.layers.{index}.{name}"
                weight.copy_(target.weight(stored, tuple(weight.shape)))
        self.norm.weight.copy_(target.weight("model.norm.weight", tuple(self.norm.weight.shape)))

    def states(self, batch: Batch, target: HiddenStates) -> Tensor:
        """See Drafter."""
        del target
        x = F.embedding(batch.token_ids, self._embedding)
        rotation = self._rotary.rotation(batch.positions)
        rows = None
        if is_padded(batch):
            rows = PaddedTokens.of([each.num_tokens for each in batch.spans], batch.device)
        for layer in self.layers:
            x = layer(x, rotation, batch, rows)
        places = batch.places(self.depth)
        outputs: Tensor = self.norm(x)  # [T, hidden_size]
        return outputs.index_select(0, places.flatten()).view(*places.shape, -1)

    def logits(self, states: Tensor, columns: Tensor | None = None) -> Tensor:
        """See Drafter."""
        return rows_product(states, self._lm_head, columns)

    def config(self) -> Mapping[str, Any]:
        """Return the config.json of the target's architecture, without sliding windows."""
        model = self._model
        return {
            "architectures": [model.architecture],
            "model_type": model.architecture.removesuffix("ForCausalLM").lower(),
            "num_hidden_layers": len(self.layers),
            "attention_bias": model.has_qkv_bias,
            "mlp_bias": model.has_mlp_bias,
            "sliding_window": None,
            "use_sliding_window": False,
            **self._fields,
            "vocab_size": model.vocab_size,
            "tie_word_embeddings": model.tie_word_embeddings,
        }

    def tensors(self) -> Mapping[str, Tensor]:
        """See Drafter."""
        return {f"model.{name}": each.detach() for name, each in self.state_dict().items()}

    def shared(self) -> SharedParts:
        """See Drafter."""
        return self._shared

    def files(self) -> Mapping[str, Any]:
        """See Drafter."""
        return {TOKEN_MAP_FILE: self.token_ids.tolist()}


def kept_layers(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """Return the target's layers that a draft model begins as: the first ones, and the last one."""
    if num_layers == 1:
        return (num_target_layers - 1,)
    return (*range(num_layers - 1), num_target_layers - 1)


class Layer(nn.Module):
    """A decoder layer; its parameters have the names of transformers."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        size, eps = model.hidden_size, model.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = SelfAttention(model)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(model)

    def forward(
        self, x: Tensor, rotation: Rotation, batch: Batch, rows: PaddedTokens | None
    ) -> Tensor:
        """Return [T, hidden_size]; x: the same shape. rows: None if samples attend one by one."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, batch, rows)
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


class SelfAttention(nn.Module):
    """Causal self-attention within each sample of a batch."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        size, self.head_dim, has_bias = model.hidden_size, model.head_dim, model.has_qkv_bias
        self.num_heads, self.num_kv_heads = model.num_heads, model.num_kv_heads
        query_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(size, query_size, bias=has_bias)
        self.k_proj = nn.Linear(size, kv_size, bias=has_bias)
        self.v_proj = nn.Linear(size, kv_size, bias=has_bias)
        self.o_proj = nn.Linear(query_size, size, bias=model.has_output_bias)
        self.has_qk_norm = model.has_qk_norm
        if self.has_qk_norm:
            self.q_norm = RMSNorm(self.head_dim, model.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, model.rms_norm_eps)

    def forward(
        self, x: Tensor, rotation: Rotation, batch: Batch, rows: PaddedTokens | None
    ) -> Tensor:
        """Return [T, hidden_size]; x: the same shape. rows: None if samples attend one by one."""
        query = self.q_proj(x).view(len(x), self.num_heads, self.head_dim)
        key, value = (
            projection(x).view(len(x), self.num_kv_heads, self.head_dim)
            for projection in (self.k_proj, self.v_proj)
        )
        if self.has_qk_norm:
            query, key = self.q_norm(query).to(query.dtype), self.k_norm(key).to(key.dtype)
        query, key = rotated(query, rotation), rotated(key, rotation)
        if rows is not None:
            attended = rows.attend(query, KeyValue(key, value))
        else:
            attended = self._attend(query, key, value, batch)
        output: Tensor = self.o_proj(attended.flatten(1))
        return output

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, batch: Batch) -> Tensor:
        """Return the attention of the samples one by one, [T, num_heads, head_dim] as `query`."""
        # Queries of a KV head are neighbours; [heads, T, head_dim].
        group = self.num_heads // self.num_kv_heads
        key, value = (each.repeat_interleave(group, 1).transpose(0, 1) for each in (key, value))
        query = query.transpose(0, 1)
        attended = [
            F.scaled_dot_product_attention(
                query[None, :, span.tokens],
                key[None, :, span.tokens],
                value[None, :, span.tokens],
                is_causal=True,
            )[0]
            for span in batch.spans
        ]
        return torch.cat(attended, dim=1).transpose(0, 1)


class MLP(nn.Module):
    """The gated feed-forward layer, SwiGLU (Shazeer 2020)."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        size, inner, has_bias = model.hidden_size, model.intermediate_size, model.has_mlp_bias
        self.gate_proj = nn.Linear(size, inner, bias=has_bias)
        self.up_proj = nn.Linear(size, inner, bias=has_bias)
        self.down_proj = nn.Linear(inner, size, bias=has_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, hidden_size]; x: the same shape."""
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output
