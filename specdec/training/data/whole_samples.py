"""The target's attention over whole samples on a GPU: one pass, which needs no KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.reference.attention import (
    ALL_BEFORE,
    AttentionPlan,
    QueryKeyNorms,
    Rotation,
    Visible,
)
from specdec.kernels.reference.forward_batch import ForwardBatch
from specdec.kernels.reference.kv_scales import UNIT_SCALES, KVScales
from specdec.kernels.reference.paged_attention import PagedAttention, TorchPlan
from specdec.models.llama import CausalDecoder
from specdec.training.data.padding import KeyValue, PaddedTokens


@dataclass(frozen=True)
class WholePlan(TorchPlan):
    """The AttentionPlan of WholeSampleAttention, which stores no KV: other fields are empty."""

    rows: PaddedTokens


class WholeSampleAttention(PagedAttention):
    """Causal attention of samples that begin in the pass, by torch's kernels for padded rows.

    It reads the keys and values of the pass, and leaves the cache alone.
    """

    def plan(
        self, batch: ForwardBatch, dtype: torch.dtype, visible: Visible = ALL_BEFORE
    ) -> WholePlan:
        """See PagedAttention."""
        assert visible == ALL_BEFORE, "torch's kernels have no window"
        assert all(chunk.start == 0 and chunk.parents is None for chunk in batch.chunks)
        lengths = [batch.query_len(index) for index in range(batch.num_sequences)]
        nothing = torch.empty(0, dtype=torch.int64, device=self.device)
        return WholePlan(nothing, (), PaddedTokens.of(lengths, self.device))

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
        """See PagedAttention."""
        assert isinstance(plan, WholePlan)
        assert sinks is None, "torch's kernels have no sinks"
        slots = plan.slot_mapping
        query = self.rotate_and_store(heads, norms, rotation, kv_cache, slots, scales)
        kv = heads[:, query.shape[1] :].view(len(heads), 2, self.num_kv_heads, self.head_dim)
        return plan.rows.attend(query, KeyValue(kv[:, 0], kv[:, 1]), self.scale)

    def _store(self, kv: Tensor, kv_cache: Tensor, slots: Tensor, scales: KVScales) -> None:
        """Leave the cache alone."""


def use_whole_samples(decoder: CausalDecoder) -> bool:
    """Let a decoder attend to whole samples; return whether its attention is one of torch's.

    It is not with windows, bounded scores, sinks or latents.
    """
    traits = decoder.config.traits
    is_bounded = traits.attention_softcap is not None
    has_others = traits.has_sinks or decoder.config.latent is not None
    if set(decoder.windows) != {None} or is_bounded or has_others:
        return False
    decoder.attention = WholeSampleAttention(
        decoder.heads,
        decoder.head_dim,
        decoder.attention.block_size,
        decoder.device,
        scale=traits.attention_scale,
    )
    return True
