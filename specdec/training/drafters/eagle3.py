"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): one layer on the target's features.

Training-time test (section 3.2 there): draft token i of a base is computed as in serving. Its pair
is the token before it and the drafter's own output for draft token i - 1, not the target's feature.
It attends to the pairs up to the base, which have the target's features, and to the draft's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.kernels import Rotation
from specdec.kernels.reference.forward_batch import HiddenStates
from specdec.models.heads.formats.taps import Taps, default_taps
from specdec.models.layers.rotary import RotaryEmbedding
from specdec.training.data.batches import Batch
from specdec.training.data.config import TrainingConfig
from specdec.training.data.padding import KeyValue, PaddedBases, is_padded
from specdec.training.data.target import Target
from specdec.training.drafters.base import Drafter
from specdec.training.drafters.layers import RMSNorm, draft_id_tensors, linear, rotated

_FIRST_PAIR = 1
"""Pair 0 does not exist: there is no token before the first."""
_ROW_BASES = 256
"""Bases of a padded row, whose own pairs are keys that all of them but one mask."""


class Eagle3Drafter(Drafter):
    """An EAGLE-3 head with one layer of the target's sizes."""

    def __init__(self, target: Target, token_ids: Tensor, config: TrainingConfig) -> None:
        """See Drafter."""
        super().__init__(target, token_ids, config)
        model = target.config
        size, eps = model.hidden_size, model.rms_norm_eps
        self._model, self._read = model, _taps(target)
        self._layer_fields = target.layer_fields
        self.taps = self._read.ascending
        self.fc = linear(len(self._read.layer_ids) * size, size)
        self.token_norm = RMSNorm(size, eps)
        self.feature_norm = RMSNorm(size, eps)
        self.attention = PairAttention(target)
        self.mlp_norm = RMSNorm(size, eps)
        self.gate_proj = linear(size, model.intermediate_size)
        self.up_proj = linear(size, model.intermediate_size)
        self.down_proj = linear(model.intermediate_size, size)
        self.norm = RMSNorm(size, eps)
        self.lm_head = linear(size, len(token_ids))
        # Frozen: the served head reads the target's.
        self._embedding = target.embedding.to(target.device)
        self._start_from(target)

    @torch.no_grad()
    def _start_from(self, target: Target) -> None:
        """Copy the target's last layer, final norm and output head.

        At first the highest feature passes to the layer unchanged. Attention reads embeddings with
        the weights of the target's first layer, and features with those of its last one.
        """
        size, last = target.config.hidden_size, f"model.layers.{target.config.num_layers - 1}"
        self.fc.weight.mul_(0.1)[:, -size:] += torch.eye(size)
        self.attention.start_from(target, "model.layers.0", last)
        starts: dict[str, nn.Linear | nn.RMSNorm] = {
            "model.layers.0.input_layernorm": self.token_norm,
            f"{last}.input_layernorm": self.feature_norm,
            f"{last}.post_attention_layernorm": self.mlp_norm,
            f"{last}.mlp.gate_proj": self.gate_proj,
            f"{last}.mlp.up_proj": self.up_proj,
            f"{last}.mlp.down_proj": self.down_proj,
            "model.norm": self.norm,
        }
        for name, module in starts.items():
            module.weight.copy_(target.weight(f"{name}.weight", tuple(module.weight.shape)))
        self.lm_head.weight.copy_(target.lm_head[self.token_ids])

    def states(self, batch: Batch, target: HiddenStates) -> Tensor:
        """See Drafter."""
        taps = [target.tapped[:, place] for place in self._read.order]
        read = torch.cat(taps, dim=1)  # [T, num_taps * hidden_size]
        of_pairs = self.fc(read).float().roll(1, 0)  # pair j has the feature of token j - 1
        features = of_pairs[batch.bases]
        draft = self.attention.begin(batch, self._inputs(batch.token_ids, of_pairs), self.depth)
        outputs = []
        for index in range(self.depth):
            places = batch.after(index)
            inputs = self._inputs(batch.token_ids[places], features)
            features = self._mlp(features + self.attention(inputs, draft, index))
            outputs.append(features)
        return torch.stack(outputs)

    def logits(self, states: Tensor, columns: Tensor | None = None) -> Tensor:
        """See Drafter."""
        return super().logits(self.norm(states), columns)

    def _inputs(self, token_ids: Tensor, features: Tensor) -> Tensor:
        """Return what attention reads of pairs, [N, 2 * hidden_size]."""
        embedded = F.embedding(token_ids, self._embedding)
        return torch.cat([self.token_norm(embedded), self.feature_norm(features)], dim=-1)

    def _mlp(self, x: Tensor) -> Tensor:
        normed = self.mlp_norm(x)
        output: Tensor = x + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))
        return output

    def config(self) -> Mapping[str, Any]:
        """Return the config.json of SafeAILab's layout, with SpecForge's names of the layers."""
        model = self._model
        ids = [each - 1 for each in self._read.layer_ids]  # output-of ids
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "target_hidden_size": model.hidden_size,
            **self._layer_fields,
            "vocab_size": model.vocab_size,
            "draft_vocab_size": len(self.token_ids),
            "tie_word_embeddings": False,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": ids,
            },
        }

    def tensors(self) -> Mapping[str, Tensor]:
        """See Drafter."""
        layer: dict[str, nn.Linear | nn.RMSNorm] = {
            "input_layernorm": self.token_norm,
            "hidden_norm": self.feature_norm,
            "self_attn.q_proj": self.attention.q_proj,
            "self_attn.k_proj": self.attention.k_proj,
            "self_attn.v_proj": self.attention.v_proj,
            "self_attn.o_proj": self.attention.o_proj,
            "post_attention_layernorm": self.mlp_norm,
            "mlp.gate_proj": self.gate_proj,
            "mlp.up_proj": self.up_proj,
            "mlp.down_proj": self.down_proj,
        }
        modules = {f"midlayer.{name}": module for name, module in layer.items()}
        modules |= {"fc": self.fc, "norm": self.norm, "lm_head": self.lm_head}
        tensors = {f"{name}.weight": module.weight.detach() for name, module in modules.items()}
        return tensors | draft_id_tensors(self.token_ids, self._model.vocab_size)


@dataclass(frozen=True)
class DraftAttention:
    """Keys and values that the drafts of a batch attend to.

    key, value: of the T pairs with the target's features. rows: of bases that attend in one call;
    None where each sample attends by itself. visible: for each sample, or group of rows, which of
    the pairs its bases attend to, [num_bases, num_tokens] or [n, b, t] bool. own_keys, own_values:
    of the drafts' pairs after the bases, [R, num_kv_heads, head_dim] each.
    """

    batch: Batch
    key: Tensor  # [T, num_kv_heads, head_dim]
    value: Tensor  # [T, num_kv_heads, head_dim]
    rows: PaddedBases | None
    visible: Sequence[Tensor]
    own_keys: list[Tensor]
    own_values: list[Tensor]


class PairAttention(nn.Module):
    """Self-attention whose queries and keys read pairs of 2 * hidden_size."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        model = target.config
        size, self.head_dim = model.hidden_size, model.head_dim
        self.num_heads, self.num_kv_heads = model.num_heads, model.num_kv_heads
        self.q_proj = linear(2 * size, self.num_heads * self.head_dim)
        self.k_proj = linear(2 * size, self.num_kv_heads * self.head_dim)
        self.v_proj = linear(2 * size, self.num_kv_heads * self.head_dim)
        self.o_proj = linear(self.num_heads * self.head_dim, size)
        self._rotary = RotaryEmbedding(
            self.head_dim, model.max_position_embeddings, model.rope, torch.float32, target.device
        )

    def start_from(self, target: Target, first: str, last: str) -> None:
        """Copy weights of two layers: those of `first` read the token, those of `last` features."""
        size = self.o_proj.out_features
        for name in ("q_proj", "k_proj", "v_proj"):
            weight: Tensor = getattr(self, name).weight
            for layer, columns in ((first, slice(0, size)), (last, slice(size, None))):
                shape = (len(weight), size)
                weight[:, columns] = target.weight(f"{layer}.self_attn.{name}.weight", shape)
        weight = self.o_proj.weight
        weight.copy_(target.weight(f"{last}.self_attn.o_proj.weight", tuple(weight.shape)))

    def begin(self, batch: Batch, inputs: Tensor, depth: int) -> DraftAttention:
        """Compute keys and values of the T pairs; inputs: [T, 2 * hidden_size].

        depth: of the draft.
        """
        key, value = self._key_value(inputs, self._rotary.rotation(batch.positions))
        if is_padded(batch):
            rows = PaddedBases.of(batch, _ROW_BASES, num_own=depth)
            visible = [(each.is_before | each.is_own) & ~each.is_first for each in rows.groups]
            return DraftAttention(batch, key, value, rows, visible, [], [])
        visible = []
        for span in batch.spans:
            positions = batch.positions[span.tokens]
            bases = batch.positions[batch.bases[span.bases]][:, None]
            visible.append((positions <= bases) & (positions >= _FIRST_PAIR))
        return DraftAttention(batch, key, value, None, visible, [], [])

    def forward(self, inputs: Tensor, draft: DraftAttention, index: int) -> Tensor:
        """Return the attention of draft token `index` of each base, [R, hidden_size].

        inputs: of its pair, [R, 2 * hidden_size]. The pair of draft token 0 is the base's own, one
        of the T.
        """
        # Pairs after the context belong to drafts that do not exist.
        positions = draft.batch.positions[draft.batch.bases] + index
        rotation = self._rotary.rotation(positions.clamp(max=self._rotary.max_positions - 1))
        query = rotated(self._heads(self.q_proj(inputs), self.num_heads), rotation)
        if index:
            key, value = self._key_value(inputs, rotation)
            draft.own_keys.append(key)
            draft.own_values.append(value)
        output: Tensor = self.o_proj(self._attend(query, draft).flatten(1))
        return output

    def _attend(self, query: Tensor, draft: DraftAttention) -> Tensor:
        """Return the attention of all bases; as query, [R, num_heads, head_dim]."""
        if draft.rows is None:
            spans = enumerate(draft.batch.spans)
            return torch.cat(
                [self._attend_span(query[span.bases], draft, place) for place, span in spans]
            )
        own = KeyValue(_stacked(draft.own_keys, draft.key), _stacked(draft.own_values, draft.value))
        context = KeyValue(draft.key, draft.value)
        attended = draft.rows.attend(query[:, None], context, own, draft.visible)
        return attended.view_as(query)

    def _attend_span(self, query: Tensor, draft: DraftAttention, place: int) -> Tensor:
        """Return the attention of the bases of span `place`; as query, [b, num_heads, head_dim]."""
        span = draft.batch.spans[place]
        num_bases, num_kv_heads, head_dim = len(query), self.num_kv_heads, self.head_dim
        group = self.num_heads // num_kv_heads  # queries of a KV head
        # [num_kv_heads, b, group, head_dim]
        grouped = query.view(num_bases, num_kv_heads, group, head_dim).transpose(0, 1)
        flat = grouped.reshape(num_kv_heads, num_bases * group, head_dim) * head_dim**-0.5
        key = draft.key[span.tokens].permute(1, 2, 0)  # [num_kv_heads, head_dim, t]
        hidden = ~draft.visible[place].repeat_interleave(group, 0)
        scores = (flat @ key).float().masked_fill(hidden, float("-inf"))
        if not draft.own_keys:
            weights = scores.softmax(-1).to(key.dtype)
            return self._ungrouped(weights @ draft.value[span.tokens].transpose(0, 1), num_bases)
        own = self._own(draft.own_keys, span.bases)
        own_scores = (flat.view_as(grouped).unsqueeze(-2) * own).sum(-1).flatten(1, 2)
        weights = torch.cat([scores, own_scores.float()], dim=-1).softmax(-1).to(key.dtype)
        shared, mine = weights.split([scores.shape[-1], len(draft.own_keys)], dim=-1)
        attended = shared @ draft.value[span.tokens].transpose(0, 1)
        values = self._own(draft.own_values, span.bases)
        mine = mine.view(*grouped.shape[:-1], len(draft.own_keys), 1)
        attended = attended + (mine * values).sum(-2).flatten(1, 2)
        return self._ungrouped(attended, num_bases)

    def _own(self, parts: Sequence[Tensor], bases: slice) -> Tensor:
        """Return keys or values of drafts, [num_kv_heads, b, 1, num_drafts, head_dim]."""
        return torch.stack([each[bases] for each in parts], dim=2).transpose(0, 1).unsqueeze(2)

    def _ungrouped(self, attended: Tensor, num_bases: int) -> Tensor:
        """Return [b, num_heads, head_dim] of [num_kv_heads, b * queries of a KV head, head_dim]."""
        group = self.num_heads // self.num_kv_heads
        parts = attended.view(self.num_kv_heads, num_bases, group, self.head_dim)
        return parts.transpose(0, 1).reshape(num_bases, self.num_heads, self.head_dim)

    def _key_value(self, inputs: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Return keys and values of pairs, [N, num_kv_heads, head_dim] each."""
        key = rotated(self._heads(self.k_proj(inputs), self.num_kv_heads), rotation)
        return key, self._heads(self.v_proj(inputs), self.num_kv_heads)

    def _heads(self, x: Tensor, count: int) -> Tensor:
        return x.view(len(x), count, self.head_dim)


def _stacked(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return keys or values [R, num_parts, ...] of drafts; without any, of no drafts.

    like: [T, ...].
    """
    return torch.stack(list(parts), dim=1) if parts else like[:, None][:, :0]


def _taps(target: Target) -> Taps:
    """Return the default layers, fewer for a target of few layers."""
    found = next(filter(None, (default_taps(count, target.config) for count in (3, 2, 1))), None)
    assert found is not None, "one, two or three of the default layers are distinct"
    return found
