"""Recurrent heads on the native CPU kernels: a pass is one call, and so is a whole draft.

Built from the layers of a `RecurrentHead`, which own the weights and define the result. States are
float32 for every weight format, and a pair's result is the same bits alone and in any batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar, cast

import torch
from torch import Tensor

from specdec.kernels.cpu import MatrixStruct, native_library
from specdec.kernels.cpu.decoder import LayerStruct
from specdec.kernels.cpu.draft_head import DraftHeadKernel, DraftHeadStruct, PairStates
from specdec.kernels.cpu.drafts import HeadKernel
from specdec.kernels.reference.forward_batch import AdapterRun, ForwardBatch, PairInputs
from specdec.kernels.reference.sample_rows import SampleParams
from specdec.models.heads.networks.adapted import JoinedAdapters
from specdec.models.heads.networks.base import FIRST_SLOT, FrontierNodes, HeadCapabilities
from specdec.models.heads.networks.eagle3 import Eagle3Head, FirstLayer
from specdec.models.heads.networks.fused import FusedHead
from specdec.models.heads.networks.layers import KvHead, UnnormalizedLayer
from specdec.models.heads.networks.recurrent import Place, tree_chunks
from specdec.models.heads.networks.vocabulary import has_ascending_tokens, own_target_tokens
from specdec.models.layers.decoder_layer import DecoderLayer
from specdec.models.layers.mixture import SparseMLP
from specdec.models.layers.mlp import MLP
from specdec.models.layers.rotary import RotaryEmbedding
from specdec.models.lora.native_adapters import NativeAdapters
from specdec.models.lora.updates import AdapterStore
from specdec.models.native_weights import NativeWeights, all_reduce_of, native_matrix

KernelT = TypeVar("KernelT", bound=HeadKernel)
TorchHead = Eagle3Head | FusedHead
_Layer = DecoderLayer | FirstLayer | UnnormalizedLayer


@dataclass(frozen=True)
class NativeHeadState:
    """States after the last pairs of B sequences, and where the next pairs are stored."""

    pairs: PairStates
    places: tuple[Place, ...]
    block_size: int
    kv_cache: Tensor


class NativeKvHead:
    """The parts of a head with attention on native kernels, however it drafts; see DraftHead."""

    torch_head: KvHead
    _kernel: HeadKernel

    def __init__(self, head: KvHead) -> None:
        """Use the weights of `head`, whose matrices must be native."""
        self.torch_head = head
        self.taps, self.feature_size = head.taps, head.feature_size
        self.num_kv_layers, self.max_draft_tokens = head.num_kv_layers, head.max_draft_tokens
        self.vocab_size, self.vocab_slice = head.vocab_size, head.vocab_slice
        self.reads_drafts, self.target_ids = head.reads_drafts, head.target_ids
        self._lm_head = native_matrix(head.lm_head.matrix)
        self._weights = NativeWeights()
        self._target_tokens = own_target_tokens(head.target_ids, head.vocab_slice)

    @property
    def device(self) -> torch.device:
        return self.torch_head.device

    @property
    def can_draft(self) -> bool:
        """Return whether kernels draft whole drafts: they combine the samples of all ranks.

        They sample from the products of the output head, which some families scale or bound.
        """
        is_plain = self.torch_head.lm_head.transform.is_identity
        return is_plain and self._kernel.can_draft and has_ascending_tokens(self.target_ids)

    def new_kv_cache(self, num_slots: int) -> Tensor:
        """See DraftHead; in the layout of the kernels."""
        attention = self.torch_head.attention
        block_size = attention.paged.block_size
        assert num_slots % block_size == 0
        return self._kernel.new_kv_cache(num_slots // block_size, block_size, attention.dtype)

    def features(self, states: Tensor, runs: Sequence[AdapterRun] = ()) -> Tensor:
        """See DraftHead."""
        return self.torch_head.features(states, runs)


def kernel_of(kind: type[KernelT], head: KvHead, struct: ctypes.Structure) -> KernelT:
    """Return the kernels of a head. struct: its weights, which the caller owns."""
    library = native_library()
    assert library is not None, "the backend was selected without its library"
    all_reduce = all_reduce_of(head.embed_tokens.group)
    return kind(library, struct, head.attention.rotary.max_positions, all_reduce)


class NativeHead(NativeKvHead):
    """One rank of a recurrent head on native kernels, a DraftHead."""

    torch_head: TorchHead
    _kernel: DraftHeadKernel

    def __init__(self, head: TorchHead) -> None:
        super().__init__(head)
        self._kernel = kernel_of(DraftHeadKernel, head, self._struct(head))

    @cached_property
    def capabilities(self) -> HeadCapabilities:
        """See DraftHead."""
        return HeadCapabilities(runs_nodes=True, drafts_whole=self.can_draft)

    def enable_adapters(self, dtype: torch.dtype) -> AdapterStore:
        """See DraftHead."""
        head, self._kernel.adapters = self.torch_head, {}
        fusion = head.fc.linear if isinstance(head, FusedHead) else None
        native = NativeAdapters(_layers_of(head), dtype, self._kernel.adapters, fusion)
        if isinstance(head, FusedHead):
            return native
        return JoinedAdapters(head.adapt(head.projection, dtype), native)

    def begin(
        self, pairs: ForwardBatch, features: Tensor, kv_cache: Tensor | None, num_draft_tokens: int
    ) -> NativeHeadState:
        """See DraftHead."""
        assert kv_cache is not None
        states = self._kernel.forward(pairs, features, kv_cache)
        places = tuple(map(Place.after, pairs.chunks))
        return NativeHeadState(states, places, pairs.block_size, kv_cache)

    def logits(self, state: NativeHeadState, index: int) -> Tensor:
        """See DraftHead."""
        logits: Tensor = self.torch_head.lm_head(state.pairs.hidden)
        return logits

    def advance(
        self, state: NativeHeadState, token_ids: Sequence[int], index: int
    ) -> NativeHeadState:
        """See DraftHead."""
        chunks = [
            place.chunk([token]) for token, place in zip(token_ids, state.places, strict=True)
        ]
        batch = ForwardBatch(chunks, state.block_size)
        return self.begin(batch, state.pairs.features, state.kv_cache, 0)

    def advance_nodes(
        self, state: NativeHeadState, trees: Sequence[FrontierNodes]
    ) -> NativeHeadState:
        """See TreeDraftHead."""
        rows = [row for tree in trees for row in tree.rows]
        batch = ForwardBatch(tree_chunks(trees, state.places), state.block_size)
        features = state.pairs.features[rows]
        pairs = self._kernel.forward(batch, features, state.kv_cache, range(len(rows)))
        return replace(state, pairs=pairs, places=tuple(state.places[row] for row in rows))

    def select(self, state: NativeHeadState, rows: Sequence[int]) -> NativeHeadState:
        """See DraftHead."""
        index = list(rows)
        pairs = PairStates(*(each[index] for each in state.pairs))
        return replace(state, pairs=pairs, places=tuple(state.places[row] for row in rows))

    def draft(
        self, inputs: PairInputs, counts: Sequence[int], params: SampleParams
    ) -> list[list[int]]:
        """See WholeDraftHead."""
        return self._kernel.draft(inputs, counts, params)

    def _struct(self, head: TorchHead) -> DraftHeadStruct:
        weights = self._weights
        decoder = weights.decoder(
            self._layers(head),
            head.attention.config,
            head.embed_tokens,
            head.norm,
            FIRST_SLOT,
        )
        first = head.first_layer if isinstance(head, Eagle3Head) else head
        struct = DraftHeadStruct(
            decoder=decoder,
            reads_features=True,
            embedding_norm=weights.norm(first.token_norm).weight,
            feature_norm=weights.norm(first.feature_norm).weight,
            returns_normed=head.recycles_norm,
            lm_head=MatrixStruct.from_buffer_copy(self._lm_head.native),
            target_tokens=self._target_tokens.data_ptr(),
        )
        if isinstance(head, Eagle3Head):
            struct.adds_to_normed = head.first_layer.norm_before_residual
        else:
            struct.fusion = weights.matrix(head.fc.linear)
            struct.first_input = head.fc.columns.start
            struct.is_feature_first = head.is_feature_first
        return struct

    def _layers(self, head: TorchHead) -> list[LayerStruct]:
        windows, rotary = head.attention.windows, head.attention.rotary
        return [
            self._layer(each, rotary, window)
            for each, window in zip(_layers_of(head), windows, strict=True)
        ]

    def _layer(self, layer: _Layer, rotary: RotaryEmbedding, window: int | None) -> LayerStruct:
        return self._weights.layer(
            layer.mixer,
            layer.mlp_norm,
            cast(MLP | SparseMLP, layer.mlp),
            input_norm=layer.input_norm if isinstance(layer, DecoderLayer) else None,
            rotary=rotary,
            window=window,
        )


def _layers_of(head: TorchHead) -> list[_Layer]:
    layers = list(cast(Sequence[_Layer], head.layers))
    return [head.first_layer, *layers] if isinstance(head, Eagle3Head) else layers
