"""Medusa heads on the native CPU kernels: all of them are one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from specdec.kernels.cpu import native_library
from specdec.kernels.cpu.medusa import MedusaKernel
from specdec.kernels.reference.forward_batch import AdapterRun, ForwardBatch
from specdec.models.heads.networks.base import HeadCapabilities
from specdec.models.heads.networks.medusa import MedusaHeads, ResidualBlock
from specdec.models.heads.networks.projection import SharedInputLinear
from specdec.models.layers.linear import VocabHead
from specdec.models.lora.updates import AdapterStore
from specdec.models.native_weights import NativeWeights, native_matrix


class NativeMedusaHeads:
    """Medusa heads of one rank that holds them all, a DraftHead.

    Its state is the logits of all draft tokens, [K, B, vocab_size].
    """

    num_kv_layers = 0
    reads_drafts = False
    capabilities = HeadCapabilities()

    def __init__(self, heads: MedusaHeads) -> None:
        """Use the weights of `heads`, whose matrices must be native."""
        library = native_library()
        assert library is not None, "the backend was selected without its library"
        assert heads.vocab_slice == range(heads.vocab_size), "the heads are divided over ranks"
        self.torch_heads = heads
        self.taps, self.feature_size = heads.taps, heads.feature_size
        self.max_draft_tokens = heads.max_draft_tokens
        self.vocab_size, self.vocab_slice = heads.vocab_size, heads.vocab_slice
        self.target_ids = heads.target_ids
        self._weights = NativeWeights()
        lm_heads = list(dict.fromkeys(cast(Sequence[VocabHead], heads.lm_heads)))
        self._kernel = MedusaKernel(
            library,
            [
                [
                    self._weights.matrix(layer.linear)
                    for layer in cast(Sequence[SharedInputLinear], block.layers)
                ]
                for block in cast(Sequence[ResidualBlock], heads.blocks)
            ],
            [native_matrix(each.matrix).native for each in lm_heads],
        )

    @property
    def device(self) -> torch.device:
        return self.torch_heads.device

    def new_kv_cache(self, num_slots: int) -> None:
        """See DraftHead."""

    def enable_adapters(self, dtype: torch.dtype) -> AdapterStore:
        """See DraftHead."""
        return self.torch_heads.enable_adapters(dtype)

    def features(self, states: Tensor, runs: Sequence[AdapterRun] = ()) -> Tensor:
        """See DraftHead."""
        return self.torch_heads.features(states, runs)

    def begin(
        self, pairs: ForwardBatch, features: Tensor, kv_cache: Tensor | None, num_draft_tokens: int
    ) -> Tensor:
        """Return the logits of `num_draft_tokens` heads; torch computes rows with an adapter."""
        assert self.max_draft_tokens is not None
        count = min(max(num_draft_tokens, 1), self.max_draft_tokens)
        is_adapted = torch.zeros(len(features), dtype=torch.bool, device="cpu")
        for run in self.torch_heads.updating(pairs.adapter_runs):
            is_adapted[run.begin : run.end] = True
        if not is_adapted.any():
            return self._kernel.logits(features.float(), count)
        logits = torch.empty(count, len(features), self.vocab_size, device="cpu")
        if not is_adapted.all():
            logits[:, ~is_adapted] = self._kernel.logits(features[~is_adapted].float(), count)
        adapted = self.torch_heads.begin(pairs, features, None, count).select(
            is_adapted.nonzero().flatten().tolist()
        )
        for index in range(count):
            logits[index, is_adapted] = self.torch_heads.logits(adapted, index)
        return logits

    def logits(self, state: Tensor, index: int) -> Tensor:
        """See DraftHead."""
        return state[index]

    def advance(self, state: Tensor, token_ids: Sequence[int], index: int) -> Tensor:
        """Return the same state: no head reads the drafts before it."""
        return state

    def select(self, state: Tensor, rows: Sequence[int]) -> Tensor:
        """See DraftHead."""
        return state[:, list(rows)]


def on_native_kernels(heads: MedusaHeads) -> MedusaHeads | NativeMedusaHeads:
    """Return the heads on native kernels, where one rank has all and their logits are plain."""
    is_whole = heads.vocab_slice == range(heads.vocab_size)
    return NativeMedusaHeads(heads) if is_whole and heads.has_plain_logits else heads
