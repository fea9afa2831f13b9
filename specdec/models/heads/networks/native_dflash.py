"""DFlash and DSpark on the native CPU kernels: blocks are one call, and so is a whole draft.

Built from the layers of a `DFlashHead`, which own the weights and define the result. Outputs are
float32 for every weight format, and a block's result is the same bits alone and in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from specdec.kernels.cpu import MatrixStruct
from specdec.kernels.cpu.block_head import (
    MARKOV_KINDS,
    BlockHeadKernel,
    BlockHeadStruct,
    MarkovStruct,
)
from specdec.kernels.cpu.decoder import LayerStruct
from specdec.kernels.reference.forward_batch import ForwardBatch, PairInputs
from specdec.kernels.reference.sample_rows import SampleParams
from specdec.models.heads.networks.adapted import JoinedAdapters
from specdec.models.heads.networks.base import FIRST_SLOT, HeadCapabilities
from specdec.models.heads.networks.dflash import BlockState, DFlashHead
from specdec.models.heads.networks.markov import MarkovHead
from specdec.models.heads.networks.native import NativeKvHead, kernel_of
from specdec.models.layers.decoder_layer import DecoderLayer
from specdec.models.layers.mlp import MLP
from specdec.models.lora.native_adapters import NativeAdapters
from specdec.models.lora.updates import AdapterStore
from specdec.models.native_weights import embedding_struct, native_matrix
from specdec.types.drafts.draft_tree import TokenTree, TreeSize


class NativeDFlashHead(NativeKvHead):
    """One rank of a DFlash or DSpark head on native kernels, a WholeTreeHead.

    Keys are rotated to their slots, which are one after the positions of the torch layers: only
    differences of positions enter attention.
    """

    torch_head: DFlashHead
    _kernel: BlockHeadKernel

    def __init__(self, head: DFlashHead) -> None:
        super().__init__(head)
        self._kernel = kernel_of(BlockHeadKernel, head, self._struct(head))

    @cached_property
    def capabilities(self) -> HeadCapabilities:
        """See DraftHead; kernels draft whole trees on one rank."""
        has_one_rank = self.torch_head.embed_tokens.group.size == 1
        can_draft_trees = self.can_draft and has_one_rank and self.reads_drafts
        return HeadCapabilities(drafts_whole=self.can_draft, drafts_whole_trees=can_draft_trees)

    def enable_adapters(self, dtype: torch.dtype) -> AdapterStore:
        """See DraftHead."""
        head, self._kernel.adapters = self.torch_head, {}
        layers = cast(Sequence[DecoderLayer], head.layers)
        native = NativeAdapters(layers, dtype, self._kernel.adapters)
        return JoinedAdapters(head.adapt(head.fc, dtype), native)

    @torch.inference_mode()
    def begin(
        self, pairs: ForwardBatch, features: Tensor, kv_cache: Tensor | None, num_draft_tokens: int
    ) -> BlockState | None:
        """See DraftHead; the token of a pair matters only if a draft begins after it."""
        assert kv_cache is not None
        assert self.max_draft_tokens is not None
        count = min(num_draft_tokens, self.max_draft_tokens)
        outputs = self._kernel.forward(pairs, features, kv_cache, count)
        if not count:
            return None
        lm_head = self.torch_head.lm_head
        logits = lm_head(outputs.flatten(0, 1)).unflatten(0, outputs.shape[:2])
        return self.torch_head.state_of(pairs, outputs.transpose(0, 1), logits.transpose(0, 1))

    def logits(self, state: BlockState, index: int) -> Tensor:
        """See DraftHead."""
        return self.torch_head.logits(state, index)

    def advance(self, state: BlockState, token_ids: Sequence[int], index: int) -> BlockState:
        """See DraftHead."""
        return self.torch_head.advance(state, token_ids, index)

    def select(self, state: BlockState, rows: Sequence[int]) -> BlockState:
        """See DraftHead."""
        return self.torch_head.select(state, rows)

    def draft(
        self, inputs: PairInputs, counts: Sequence[int], params: SampleParams
    ) -> list[list[int]]:
        """See WholeDraftHead."""
        return self._kernel.draft(inputs, counts, params)

    def draft_trees(
        self, inputs: PairInputs, sizes: Sequence[TreeSize], params: SampleParams
    ) -> list[TokenTree]:
        """See WholeTreeHead."""
        return self._kernel.draft_trees(inputs, sizes, params)

    def _struct(self, head: DFlashHead) -> BlockHeadStruct:
        decoder = self._weights.decoder(
            self._layers(head),
            head.attention.config,
            head.embed_tokens,
            head.norm,
            FIRST_SLOT,
        )
        struct = BlockHeadStruct(
            decoder=decoder,
            draft_block_size=head.shape.block_size,
            first_output=0 if head.shape.predicts_from_anchor else 1,
            mask_token=head.shape.mask_token_id,
            lm_head=MatrixStruct.from_buffer_copy(self._lm_head.native),
            target_tokens=self._target_tokens.data_ptr(),
        )
        if head.markov is not None:
            struct.markov = self._markov(head.markov)
        return struct

    def _layers(self, head: DFlashHead) -> list[LayerStruct]:
        return [
            self._weights.layer(
                layer.grouped_attention,
                layer.mlp_norm,
                cast(MLP, layer.mlp),
                input_norm=layer.input_norm,
                rotary=head.attention.rotary,
                window=visibility.window,
                sees_ahead=not visibility.is_causal,
            )
            for layer, visibility in zip(
                cast(Sequence[DecoderLayer], head.layers), head.visibilities, strict=True
            )
        ]

    def _markov(self, markov: MarkovHead) -> MarkovStruct:
        struct = MarkovStruct(
            kind=MARKOV_KINDS[markov.kind],
            size=markov.rank,
            embedding=embedding_struct(markov.w1),
            output=MatrixStruct.from_buffer_copy(native_matrix(markov.w2.matrix).native),
        )
        if markov.projection is not None:
            struct.projection = self._weights.matrix(markov.projection.linear)
            struct.first_input = markov.projection.columns.start
        return struct
