"""Paged attention in torch: prefill, decode and draft tokens of a flat batch in one call.

A `PagedAttention` is called twice: `plan`, once per forward pass on the host, and `rotate_and_run`,
once per layer. Here is the reference, for any device; `kernels.triton.attention` runs on GPUs.

The KV cache of one layer is [num_slots, 2, num_kv_heads, head_dim] (keys, then values), so that
writing a token's KV and reading a sequence's pages are one indexed copy each. With latents it is
[num_slots, 1, 1, head_dim]: the last dimensions of the key that all heads share are their value.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.config.gpu.attention_splits import MAX_SHORT_QUERY_TOKENS
from specdec.kernels.reference.attention import (
    ALL_BEFORE,
    AttentionPlan,
    QueryKeyNorms,
    Rotation,
    Visible,
)
from specdec.kernels.reference.attention_masks import context_mask, mask_nodes, mask_tree
from specdec.kernels.reference.device_batch import AnyDeviceBatch, RaggedBatch
from specdec.kernels.reference.forward_batch import ForwardBatch, on_device
from specdec.kernels.reference.kv_scales import (
    UNIT_SCALES,
    KVScales,
    as_bytes,
    is_quantized,
    stored_values,
)
from specdec.types.sharding import HeadShard


@dataclass(frozen=True)
class AttentionGroup:
    """G sequences of similar visible context, padded to Q query tokens and S context tokens."""

    rows: Tensor  # [G, Q] int64: flat token of each query; padding repeats the last one
    slots: Tensor  # [G * S] int64: KV slot of each visible position; padding repeats the last
    mask: Tensor | None  # [G, 1, Q * heads_per_kv, S] additive; None when nothing is masked


@dataclass(frozen=True)
class TorchPlan:
    """The AttentionPlan of torch."""

    slot_mapping: Tensor  # [T] int64
    groups: tuple[AttentionGroup, ...]

    @property
    def is_one_block(self) -> bool:
        """Return whether one group without padding holds all tokens, as in a decode batch."""
        return len(self.groups) == 1 and self.groups[0].rows.numel() == len(self.slot_mapping)


@dataclass(frozen=True)
class _Member:
    """A sequence of a group, and the first block that is visible to its queries."""

    index: int
    first_block: int


class PagedAttention:
    """Grouped-query attention over one rank's paged KV cache.

    missing_heads: query heads of the KV groups that other ranks hold, before this rank's and
    after them. copies_pages: whether the visible pages are copied, for `plan_on_device` those of
    whole tables.
    """

    copies_pages = True

    _workspace: Tensor | None = None  # in the dtype of the cache

    def __init__(
        self,
        heads: HeadShard,
        head_dim: int,
        block_size: int,
        device: torch.device,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        latent_rank: int | None = None,
    ) -> None:
        """heads: of this rank. scale: factor of scores; None: 1 / sqrt(head_dim).

        softcap: bound c of scores s, which become c * tanh(s / c); None: no bound. latent_rank:
        dimensions of the latents that are values; None where values are apart from keys.
        """
        assert latent_rank is None or len(heads.kv) == 1, "all heads share one latent"
        self.heads, self.num_kv_heads = heads, len(heads.kv)
        self.heads_per_kv = heads.heads_per_kv
        after = len(heads.kv) * heads.heads_per_kv - heads.first_in_group - len(heads.query)
        self.missing_heads = (heads.first_in_group, after)
        self.head_dim, self.block_size, self.device = head_dim, block_size, device
        self.softcap, self.latent_rank = softcap, latent_rank
        self.scale = head_dim**-0.5 if scale is None else scale

    @property
    def kv_parts(self) -> int:
        """Vectors of a token that a KV head has in the cache: key and value, or both as one."""
        return 2 if self.latent_rank is None else 1

    @property
    def value_dim(self) -> int:
        """Dimensions of a value, and so of the result for a head."""
        return self.head_dim if self.latent_rank is None else self.latent_rank

    def plan(
        self, batch: ForwardBatch, dtype: torch.dtype, visible: Visible = ALL_BEFORE
    ) -> AttentionPlan:
        """Plan the attention of a batch for all layers in which queries see the same.

        Sequences are grouped; visible contexts within a group differ by under half.
        """
        assert not visible.num_ahead, "queries see ahead in a DeviceBatch alone"
        members: dict[tuple[int, int], list[_Member]] = defaultdict(list)
        for index, context_len in enumerate(batch.context_lens.tolist()):
            query_len = batch.query_len(index)
            nodes = batch.chunks[index].num_nodes
            first_position = context_len - max(query_len, nodes + 1)  # of a tree, that of the base
            first_visible = visible.first_position(first_position)
            member = _Member(index, first_visible // self.block_size)
            num_visible = context_len - member.first_block * self.block_size
            is_long = query_len > MAX_SHORT_QUERY_TOKENS
            members[num_visible.bit_length(), index + 1 if is_long else 0].append(member)
        groups = tuple(self._plan_group(batch, each, visible, dtype) for each in members.values())
        return TorchPlan(on_device(batch.slot_mapping, self.device), groups)

    def rotate_and_run(
        self,
        heads: Tensor,  # [T, num_heads + kv_parts * num_kv_heads, head_dim]: queries, keys, values
        norms: QueryKeyNorms | None,
        rotation: Rotation | None,
        kv_cache: Tensor,  # [num_slots, kv_parts, num_kv_heads, head_dim], changed in place
        plan: AttentionPlan,
        sinks: Tensor | None = None,  # [num_heads]
        scales: KVScales = UNIT_SCALES,
    ) -> Tensor:
        """Normalize and rotate queries and keys, store the KV, and `attend`; may change `heads`."""
        slots = plan.slot_mapping
        query = self.rotate_and_store(heads, norms, rotation, kv_cache, slots, scales)
        return self.attend(query, kv_cache, plan, sinks, scales)

    def run(
        self,
        query: Tensor,
        kv: Tensor,
        kv_cache: Tensor,
        plan: AttentionPlan,
        sinks: Tensor | None = None,
        scales: KVScales = UNIT_SCALES,
    ) -> Tensor:
        """Run as `rotate_and_run` with queries and keys that are rotated, or are not to be.

        query: [T, num_heads, head_dim]. kv: [T, kv_parts, num_kv_heads, head_dim].
        """
        heads = torch.cat([query, kv.flatten(1, 2)], 1)
        return self.rotate_and_run(heads, None, None, kv_cache, plan, sinks, scales)

    def rotate_and_store(
        self,
        heads: Tensor,
        norms: QueryKeyNorms | None,
        rotation: Rotation | None,
        kv_cache: Tensor,
        slots: Tensor,
        scales: KVScales = UNIT_SCALES,
    ) -> Tensor:
        """Write keys and values to slots [T]; return the queries [T, num_heads, head_dim].

        Other arguments as in `rotate_and_run`.
        """
        num_queries = heads.shape[1] - self.kv_parts * self.num_kv_heads
        query, kv = heads[:, :num_queries], heads[:, num_queries:]
        if norms is not None:
            key = kv[:, : self.num_kv_heads]
            query.copy_(norms.query(query))
            key.copy_(norms.key(key))
        if rotation is not None:
            rotation.apply_(heads[:, : num_queries + self.num_kv_heads])
        kv = kv.view(len(heads), self.kv_parts, self.num_kv_heads, self.head_dim)
        self._store(kv, kv_cache, slots, scales)
        return query

    def _store(self, kv: Tensor, kv_cache: Tensor, slots: Tensor, scales: KVScales) -> None:
        stored = stored_values(kv, kv_cache.dtype, scales)
        as_bytes(kv_cache).index_copy_(0, slots, as_bytes(stored))

    def plan_on_device(
        self, batch: AnyDeviceBatch, dtype: torch.dtype, visible: Visible = ALL_BEFORE
    ) -> AttentionPlan:
        """Plan a batch of fixed shape as `plan`, without a value that the host has to read.

        It is one group, whose contexts are padded to those of whole tables.
        """
        if isinstance(batch, RaggedBatch):
            assert not visible.num_ahead, "queries see ahead in a DeviceBatch alone"
            batch = batch.one_by_one()
        assert visible.chunk is None, "chunks are those of a ForwardBatch alone"
        num_sequences, num_blocks = batch.block_tables.shape
        slots = torch.arange(num_blocks * self.block_size, device=self.device)
        last = batch.context_lens.unsqueeze(1) - 1
        own = torch.minimum(slots.clamp_min(visible.kv_start), last)  # [B, S]
        pages = batch.block_tables.gather(1, own.div(self.block_size, rounding_mode="floor"))
        positions = batch.positions.view(num_sequences, batch.query_len)
        first_slots = torch.full_like(batch.context_lens, visible.kv_start)
        is_masked = context_mask(
            positions, first_slots, len(slots), visible.window, visible.num_ahead
        )
        if visible.num_ahead:
            is_masked |= (slots > last)[:, None]
        if batch.trees is not None:
            words = batch.trees.within(visible.window, batch.positions, batch.rows)
            is_masked = mask_nodes(is_masked, words.view_as(positions), batch.trees.first_nodes)
        mask = torch.zeros(is_masked.shape, dtype=dtype, device=self.device)
        mask.masked_fill_(is_masked, float("-inf"))
        rows = torch.arange(len(batch.input_ids), device=self.device)
        group = AttentionGroup(
            rows=rows.view(num_sequences, batch.query_len),
            slots=(pages * self.block_size + own % self.block_size).flatten(),
            mask=self._of_heads(mask),
        )
        return TorchPlan(batch.slot_mapping, (group,))

    def attend(
        self,
        query: Tensor,
        kv_cache: Tensor,
        plan: AttentionPlan,
        sinks: Tensor | None = None,
        scales: KVScales = UNIT_SCALES,
    ) -> Tensor:
        """Attend to a cache that has the KV of the batch; return [T, num_heads, value_dim].

        query: [T, num_heads, head_dim]. sinks: [num_heads], the score of a key that every query
        sees and that has no value (Xiao et al. 2023, section 3.3); None without.
        scales: of a cache of 8-bit floats; those of key and value are equal with latents.
        """
        assert isinstance(plan, TorchPlan)
        if plan.is_one_block:
            only = plan.groups[0]
            grouped = query.reshape(*only.rows.shape, *query.shape[1:])
            return self._attend(grouped, kv_cache, only, sinks, scales).flatten(0, 1)
        output = query.new_empty(*query.shape[:2], self.value_dim)
        for group in plan.groups:
            output[group.rows] = self._attend(query[group.rows], kv_cache, group, sinks, scales)
        return output

    def _plan_group(
        self, batch: ForwardBatch, members: list[_Member], visible: Visible, dtype: torch.dtype
    ) -> AttentionGroup:
        """Plan one group; positions are relative to the start of each sequence's first block."""
        device = self.device
        indices = [member.index for member in members]
        query_lens = torch.tensor([batch.query_len(i) for i in indices], device=device)
        starts = on_device(batch.cu_seqlens_q[indices], device)
        contexts = on_device(batch.context_lens[indices], device)
        tables = on_device(batch.block_tables[indices], device)
        first_blocks = torch.tensor([member.first_block for member in members], device=device)
        num_visible = contexts - first_blocks * self.block_size
        max_query, max_visible = int(query_lens.max()), int(num_visible.max())
        # Padding queries repeat the last one, so writing their results back is harmless.
        steps = torch.arange(max_query, device=device)
        offsets = torch.minimum(steps, query_lens[:, None] - 1)  # [G, Q]
        first_slots = (visible.kv_start - first_blocks * self.block_size).clamp_min_(0)
        rows = starts[:, None] + offsets
        absolute = on_device(batch.positions, device)[rows]
        before = first_blocks[:, None] * self.block_size
        positions, chunk = absolute - before, visible.chunk
        lowest = None if chunk is None else absolute - absolute % chunk - before
        is_masked = context_mask(positions, first_slots, max_visible, visible.window, lowest=lowest)
        for place, index in enumerate(indices):
            if (parents := batch.chunks[index].parents) is not None:
                query_len, end = batch.query_len(index), int(num_visible[place])
                last = int(absolute[place, query_len - 1])
                own = is_masked[place, :, :end]
                mask_tree(own, parents, query_len, visible.window, chunk, last)
        return AttentionGroup(
            rows=rows,
            slots=self._slots(tables, first_blocks, first_slots, num_visible, max_visible),
            mask=self._additive_mask(is_masked, dtype),
        )

    def _slots(
        self,
        tables: Tensor,
        first_blocks: Tensor,
        first_slots: Tensor,
        num_visible: Tensor,
        max_visible: int,
    ) -> Tensor:
        """Return the KV slots of visible positions, [G * max_visible].

        tables: [G, M]; first_blocks, first_slots, num_visible: [G]. Padding repeats the sequence's
        first or last position: a weight of 0 still propagates a NaN, so a query must read neither
        the KV of another sequence nor that of a rejected draft.
        """
        positions = torch.arange(max_visible, device=tables.device)
        own = torch.minimum(positions, num_visible[:, None] - 1)  # [G, max_visible]
        own = torch.maximum(own, first_slots[:, None])
        blocks = own.div(self.block_size, rounding_mode="floor")
        pages = tables.gather(1, blocks + first_blocks[:, None]) * self.block_size
        return (pages + own % self.block_size).flatten()

    def _additive_mask(self, is_masked: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the mask of a group, [G, Q, S] bool, as in AttentionGroup."""
        if not is_masked.any():
            return None
        mask = torch.zeros(is_masked.shape, dtype=dtype, device=is_masked.device)
        mask.masked_fill_(is_masked, float("-inf"))
        return self._of_heads(mask)

    def _of_heads(self, mask: Tensor) -> Tensor:
        """Return an additive mask [G, Q, S] as in AttentionGroup."""
        return mask.repeat_interleave(self.heads_per_kv, dim=1)[:, None]

    def _attend(
        self,
        query: Tensor,
        kv_cache: Tensor,
        group: AttentionGroup,
        sinks: Tensor | None,
        scales: KVScales,
    ) -> Tensor:
        """Attend within one group; query: [G, Q, num_heads, head_dim], result: value_dim last."""
        num_seqs, num_queries = query.shape[:2]
        pages = self._gather(kv_cache, group.slots).to(query.dtype)
        pages = pages.view(num_seqs, -1, *kv_cache.shape[1:])
        keys = pages[:, :, 0].transpose(1, 2)
        values = pages[:, :, -1, :, -self.value_dim :].transpose(1, 2)
        # Query heads that share a KV head become more queries of that head: no KV is repeated.
        # Heads of a KV group that other ranks hold are padded with zeros.
        before, after = self.missing_heads
        whole = F.pad(query, (0, 0, before, after)) if before or after else query
        grouped = whole.view(num_seqs, num_queries, self.num_kv_heads, self.heads_per_kv, -1)
        folded = grouped.transpose(1, 2).reshape(num_seqs, self.num_kv_heads, -1, self.head_dim)
        scores_of_sinks = None if sinks is None else self._fold_sinks(sinks, num_queries)
        scale = self.scale * scales.key
        attended = self._softmax_attention(
            folded, keys, values, group.mask, scores_of_sinks, scale=scale
        )
        if scales.value != 1.0:
            attended = attended * scales.value
        unfolded = attended.view(num_seqs, self.num_kv_heads, num_queries, self.heads_per_kv, -1)
        heads = unfolded.transpose(1, 2).reshape(*whole.shape[:3], self.value_dim)
        return heads[:, :, before : whole.shape[2] - after]

    def _fold_sinks(self, sinks: Tensor, num_queries: int) -> Tensor:
        """Return the sinks [num_heads] of folded queries, [num_kv_heads, Q * heads_per_kv, 1]."""
        by_group = F.pad(sinks, self.missing_heads).view(self.num_kv_heads, 1, self.heads_per_kv)
        return by_group.expand(-1, num_queries, -1).reshape(self.num_kv_heads, -1, 1)

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
        """Return softmax(scores + mask) V. query: [G, H, Q, D]; keys, values: [G, H, S, D].

        sinks: [H, Q, 1], scores of a key without a value.
        """
        if self.softcap is None and sinks is None:
            return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
        scores = (query @ keys.transpose(-1, -2)).mul_(scale)
        if self.softcap is not None:
            scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if mask is not None:
            scores += mask
        if sinks is not None:
            column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
            weights = torch.cat((scores, column), -1).softmax(-1, dtype=torch.float32)[..., :-1]
        else:
            weights = scores.softmax(-1, dtype=torch.float32)
        return weights.to(values.dtype) @ values

    def _gather(self, kv_cache: Tensor, slots: Tensor) -> Tensor:
        """Copy slots [N] to a reused buffer; allocating one would cost twice the copy itself."""
        source = as_bytes(kv_cache)
        numel = slots.numel() * source[0].numel()
        workspace = self._workspace
        if workspace is None or workspace.numel() < numel or workspace.dtype != source.dtype:
            workspace = self._workspace = source.new_empty(numel)
        out = workspace[:numel].view(-1, *source.shape[1:])
        found = torch.index_select(source, 0, slots, out=out)
        return found.view(kv_cache.dtype) if is_quantized(kv_cache) else found
