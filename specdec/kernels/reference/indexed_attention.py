"""Paged attention of queries to the tokens that an indexer chooses for them (DeepSeek-V3.2)."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.reference.attention import AttentionPlan, QueryKeyNorms, Rotation
from specdec.kernels.reference.kv_scales import UNIT_SCALES, KVScales
from specdec.kernels.reference.paged_attention import AttentionGroup, PagedAttention, TorchPlan
from specdec.types.sharding import HeadShard

_HEADS_AT_ONCE = 8
"""Heads of an indexer whose scores are in memory together."""

_MASK_ELEMENTS = 2**24
"""Elements of masks of all heads that are in memory together."""


class Index(NamedTuple):
    """Inputs of the scores of tokens: the sum over heads of weight * max(query key, 0)."""

    query: Tensor  # [T, heads, dim] float32
    weights: Tensor  # [T, heads] float32
    key: Tensor  # [T, dim]


class IndexedAttention(PagedAttention):
    """Attention to at most `num_chosen` tokens of a context, by latents.

    A slot of the KV cache has the indexer's key after that of attention. `choose` decides for the
    pass of this layer and of the next ones, up to another choice. Of tokens with equal scores the
    first are chosen.
    """

    _chosen: TorchPlan | None = None

    def __init__(
        self,
        heads: HeadShard,
        head_dim: int,
        block_size: int,
        device: torch.device,
        *,
        scale: float | None,
        latent_rank: int,
        num_chosen: int,
    ) -> None:
        """See PagedAttention. num_chosen: tokens that a query attends to."""
        super().__init__(heads, head_dim, block_size, device, scale=scale, latent_rank=latent_rank)
        self._num_chosen = num_chosen

    def choose(self, index: Index, kv_cache: Tensor, plan: AttentionPlan) -> None:
        """Write the indexer's keys of a pass, and choose the tokens that its queries attend to.

        kv_cache: [num_slots, 1, 1, head_dim + dim], changed in place.
        """
        assert isinstance(plan, TorchPlan)
        keys = kv_cache[..., self.head_dim :]
        self._store(index.key[:, None, None], keys, plan.slot_mapping, UNIT_SCALES)
        groups = tuple(self._narrowed(group, index, keys) for group in plan.groups)
        self._chosen = replace(plan, groups=groups)

    def rotate_and_run(
        self,
        heads: Tensor,
        norms: QueryKeyNorms | None,
        rotation: Rotation | None,
        kv_cache: Tensor,
        plan: AttentionPlan,
        sinks: Tensor | None = None,
        scales: KVScales = UNIT_SCALES,
    ) -> Tensor:
        """See PagedAttention; kv_cache: as in `choose`."""
        chosen = self._chosen
        assert chosen is not None, "the first layer of a pass chooses tokens"
        assert chosen.slot_mapping is plan.slot_mapping, "the choice is that of another pass"
        own = kv_cache[..., : self.head_dim]
        return super().rotate_and_run(heads, norms, rotation, own, chosen, sinks, scales)

    def _narrowed(self, group: AttentionGroup, index: Index, kv_cache: Tensor) -> AttentionGroup:
        """Return a group with its mask on tokens that are not chosen; kv_cache: of the indexer."""
        num_slots = len(group.slots) // len(group.rows)
        if num_slots <= self._num_chosen:
            return group
        keys = self._gather(kv_cache, group.slots).view(len(group.rows), num_slots, -1)
        scores = _scores(index.query[group.rows], index.weights[group.rows], keys.float())
        if group.mask is not None:
            scores += group.mask[:, 0]
        is_masked = ~_is_chosen(scores, self._num_chosen) | scores.isneginf()
        return replace(group, mask=self._additive_mask(is_masked, index.key.dtype))

    def _of_heads(self, mask: Tensor) -> Tensor:
        """Return a mask [G, 1, Q, S], which `_softmax_attention` repeats for heads."""
        return mask[:, None]

    def _softmax_attention(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        sinks: Tensor | None,
        *,
        scale: float,
    ) -> Tensor:
        """See PagedAttention; masks of all heads are in memory for few queries at once."""
        attend = super()._softmax_attention
        if mask is None:
            return attend(query, keys, values, None, sinks, scale=scale)
        assert sinks is None
        heads, num_slots = self.heads_per_kv, len(mask) * mask.shape[-1]
        step = max(1, _MASK_ELEMENTS // (heads * num_slots))
        parts = zip(query.split(step * heads, 2), mask.split(step, 2), strict=True)
        found = [
            attend(some, keys, values, each.repeat_interleave(heads, 2), None, scale=scale)
            for some, each in parts
        ]
        return torch.cat(found, 2)


def _scores(query: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Return the scores [G, Q, S] of keys [G, S, dim] for queries [G, Q, heads, dim]."""
    found = query.new_zeros(*query.shape[:2], keys.shape[1])
    parts = zip(query.split(_HEADS_AT_ONCE, 2), weights.split(_HEADS_AT_ONCE, 2), strict=True)
    for some, factors in parts:
        products = torch.einsum("gqhd,gsd->gqhs", some, keys).relu_()
        found += torch.einsum("gqhs,gqh->gqs", products, factors)
    return found


def _is_chosen(scores: Tensor, count: int) -> Tensor:
    """Return which of the scores [..., S] are the largest `count`, of equal ones the first."""
    least = scores.topk(count).values[..., -1:]
    is_above, is_least = scores > least, scores == least
    num_left = count - is_above.sum(-1, keepdim=True)
    return is_above | (is_least & (is_least.cumsum(-1) <= num_left))
