"""Decoder layers over blocks of tokens after bases, with the target's features as a context.

Each base has a block of B slots: its own token, then mask tokens. The slots attend to each other in
both directions, and to the context of the tokens before the base. Keys and values of the context
are projections of the same features in all layers (DFlash, arXiv 2602.06036).

Blocks of a sample attend in groups: one call per group, with the context up to its last base. Its
keys and its mask have the size of the context and of one group, not of all blocks together. On a
GPU the groups are padded rows of few calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.kernels import Rotation
from specdec.models.layers.rotary import RotaryEmbedding
from specdec.training.data.batches import Batch, Span
from specdec.training.data.padding import KeyValue, PaddedBases, is_padded
from specdec.training.data.target import Target
from specdec.training.drafters.layers import RMSNorm, linear, rotated

_GROUP_BASES = 16
_ROW_BASES = 64
"""Bases of a padded row, whose blocks are keys that all of them but one mask."""


@dataclass(frozen=True)
class BlockGroup:
    """Blocks of one sample that attend together.

    context: of the T tokens, those before the last of their bases. slots: of all slots.
    is_visible: [slots, context + slots] bool.
    """

    context: slice
    slots: slice
    is_visible: Tensor


@dataclass(frozen=True)
class Blocks:
    """The blocks of a batch, R * B slots, those of a base one after the other.

    size: B. context_rotation, rotation: of the positions of the T tokens, and of the slots.
    rows: of bases whose blocks attend in one call; None where groups do.
    """

    size: int
    token_ids: Tensor  # [R * B] int64
    context_rotation: Rotation
    rotation: Rotation
    groups: Sequence[BlockGroup]
    rows: PaddedBases | None

    @classmethod
    def of(cls, batch: Batch, size: int, mask_token_id: int, rotary: RotaryEmbedding) -> Blocks:
        """Lay out the blocks of `size` slots after all bases."""
        device = batch.device
        token_ids = torch.full((batch.num_bases, size), mask_token_id, device=device)
        token_ids[:, 0] = batch.token_ids[batch.bases]
        steps = torch.arange(size, device=device)
        # Slots after the context belong to drafts that do not exist.
        positions = batch.positions[batch.bases][:, None] + steps
        positions = positions.clamp(max=rotary.max_positions - 1)
        groups, rows = list[BlockGroup](), None
        if is_padded(batch):
            rows = PaddedBases.of(batch, _ROW_BASES, num_own=size, num_queries=size)
        else:
            groups = [each for span in batch.spans for each in _groups(batch, span, size)]
        return cls(
            size,
            token_ids.flatten(),
            rotary.rotation(batch.positions),
            rotary.rotation(positions.flatten()),
            groups,
            rows,
        )


def _groups(batch: Batch, span: Span, size: int) -> Iterator[BlockGroup]:
    """Yield the groups of a sample, in the order of its bases."""
    for start in range(span.bases.start, span.bases.stop, _GROUP_BASES):
        stop = min(start + _GROUP_BASES, span.bases.stop)
        bases = batch.bases[start:stop].repeat_interleave(size)[:, None]
        context = slice(span.tokens.start, int(bases[-1]))
        is_before = torch.arange(context.start, context.stop) < bases
        is_visible = torch.cat([is_before, bases == bases.T], dim=1)
        yield BlockGroup(context, slice(start * size, stop * size), is_visible)


class BlockLayer(nn.Module):
    """A decoder layer of the target's sizes, with normalized queries and keys as in Qwen3."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        model = target.config
        size, eps = model.hidden_size, model.rms_norm_eps
        self.attention_norm = RMSNorm(size, eps)
        self.attention = BlockAttention(target)
        self.mlp_norm = RMSNorm(size, eps)
        self.gate_proj = linear(size, model.intermediate_size)
        self.up_proj = linear(size, model.intermediate_size)
        self.down_proj = linear(model.intermediate_size, size)

    def forward(self, x: Tensor, context: Tensor, blocks: Blocks) -> Tensor:
        """Return the outputs of the slots, [R * B, hidden_size].

        x: of the slots. context: features of the T tokens, [T, hidden_size].
        """
        x = x + self.attention(self.attention_norm(x), context, blocks)
        normed = self.mlp_norm(x)
        output: Tensor = x + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))
        return output

    def published(self) -> dict[str, nn.Linear | RMSNorm]:
        """Return the modules by the names that files have for those of a layer."""
        return {
            "input_layernorm": self.attention_norm,
            "self_attn.q_proj": self.attention.q_proj,
            "self_attn.k_proj": self.attention.k_proj,
            "self_attn.v_proj": self.attention.v_proj,
            "self_attn.o_proj": self.attention.o_proj,
            "self_attn.q_norm": self.attention.q_norm,
            "self_attn.k_norm": self.attention.k_norm,
            "post_attention_layernorm": self.mlp_norm,
            "mlp.gate_proj": self.gate_proj,
            "mlp.up_proj": self.up_proj,
            "mlp.down_proj": self.down_proj,
        }

    @torch.no_grad()
    def start_from(self, target: Target, index: int) -> None:
        """Copy a layer of the target; norms of queries and keys that it lacks stay at 1."""
        for name, module in self.published().items():
            if name in ("self_attn.q_norm", "self_attn.k_norm") and not target.config.has_qk_norm:
                continue
            shape = tuple(module.weight.shape)
            module.weight.copy_(target.weight(f"model.layers.{index}.{name}.weight", shape))


class BlockAttention(nn.Module):
    """Attention of slots to the context before their base and to their block."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        model = target.config
        size, self.head_dim = model.hidden_size, model.head_dim
        self.num_heads, self.num_kv_heads = model.num_heads, model.num_kv_heads
        self.q_proj = linear(size, self.num_heads * self.head_dim)
        self.k_proj = linear(size, self.num_kv_heads * self.head_dim)
        self.v_proj = linear(size, self.num_kv_heads * self.head_dim)
        self.o_proj = linear(self.num_heads * self.head_dim, size)
        self.q_norm = RMSNorm(self.head_dim, model.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, model.rms_norm_eps)

    def forward(self, normed: Tensor, context: Tensor, blocks: Blocks) -> Tensor:
        """Return the attention of the slots, [R * B, hidden_size]; see BlockLayer."""
        query = self._heads(self.q_proj(normed), self.num_heads)
        query = rotated(self.q_norm(query), blocks.rotation)
        context_key, context_value = self._key_value(context, blocks.context_rotation)
        own_key, own_value = self._key_value(normed, blocks.rotation)
        context_pair, own = KeyValue(context_key, context_value), KeyValue(own_key, own_value)
        output: Tensor = self.o_proj(self._attend(query, context_pair, own, blocks))
        return output

    def _attend(self, query: Tensor, context: KeyValue, own: KeyValue, blocks: Blocks) -> Tensor:
        """Return the attention of the slots, [R * B, num_heads * head_dim].

        query: [R * B, num_heads, head_dim]. context, own: of the T tokens, and of the slots.
        """
        if blocks.rows is not None:
            queries, *pair = (x.unflatten(0, (-1, blocks.size)) for x in (query, *own))
            visible = [each.is_before for each in blocks.rows.groups]
            return blocks.rows.attend(queries, context, KeyValue(*pair), visible).flatten(0, 1)
        attended = [
            self._attend_group(
                query[group.slots],
                torch.cat([context.key[group.context], own.key[group.slots]]),
                torch.cat([context.value[group.context], own.value[group.slots]]),
                group.is_visible,
            )
            for group in blocks.groups
        ]
        # Samples without a base have no group, and no slots.
        return torch.cat(attended) if attended else query.flatten(1)

    def _attend_group(
        self, query: Tensor, key: Tensor, value: Tensor, is_visible: Tensor
    ) -> Tensor:
        """Return [n, num_heads * head_dim] for a group of n slots.

        query: [n, num_heads, head_dim]. key, value: [S, num_kv_heads, head_dim].
        """
        per_kv_head = self.num_heads // self.num_kv_heads
        # [num_kv_heads, per_kv_head, n or S, head_dim]; query heads share views of keys and values.
        grouped = query.unflatten(1, (self.num_kv_heads, per_kv_head)).permute(1, 2, 0, 3)
        shared_key, shared_value = (
            each.transpose(0, 1)[:, None].expand(-1, per_kv_head, -1, -1) for each in (key, value)
        )
        attended = F.scaled_dot_product_attention(
            grouped, shared_key, shared_value, attn_mask=is_visible
        )
        return attended.permute(2, 0, 1, 3).flatten(1)

    def _key_value(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Return keys and values [N, num_kv_heads, head_dim] of x [N, hidden_size]."""
        key = self.k_norm(self._heads(self.k_proj(x), self.num_kv_heads))
        return rotated(key, rotation), self._heads(self.v_proj(x), self.num_kv_heads)

    def _heads(self, x: Tensor, count: int) -> Tensor:
        return x.view(len(x), count, self.head_dim)
