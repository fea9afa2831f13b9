"""Decoder that runs each forward pass as one call of the native CPU kernels.

Built from the layers of a `CausalDecoder`, which own the weights. Hidden states and logits are
float32 for every weight format, and each row is the same bits alone, in any batch and with any
chunking of its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from specdec.config.engine import AdapterLimits
from specdec.kernels.cpu import MatrixStruct, native_library
from specdec.kernels.cpu.decoder import DecoderKernel
from specdec.kernels.cpu.draft_head import DraftHeadKernel, DraftHeadStruct
from specdec.kernels.cpu.recurrence import PassStates
from specdec.kernels.reference.forward_batch import ForwardBatch, HiddenStates, PairInputs, SlotMove
from specdec.kernels.reference.sample_rows import Argmax, RowArgmax, SampleParams
from specdec.kernels.sample import logits_and_argmax
from specdec.models.config.layer_patterns import Windows
from specdec.models.hybrid import HybridDecoder
from specdec.models.layers.decoder_layer import DecoderLayer
from specdec.models.layers.mixture import SparseMLP
from specdec.models.layers.mlp import MLP
from specdec.models.llama import CausalDecoder
from specdec.models.lora.native_adapters import NativeAdapters
from specdec.models.native_weights import NativeWeights, all_reduce_of, native_matrix

_Layers = Sequence[DecoderLayer]


class NativeDecoder:
    """One rank of a decoder on native kernels; `forward` is a collective call."""

    def __init__(self, model: CausalDecoder) -> None:
        """Use the weights of `model`, whose matrices must be native."""
        library = native_library()
        assert library is not None, "the backend was selected without its library"
        self.torch_decoder = model
        self._head = native_matrix(model.lm_head.matrix)
        self._weights = NativeWeights()
        windows = cast(Windows, model.windows)  # without chunks, which have no kernels
        kinds = zip(cast(_Layers, model.layers), model.config.ropes, windows, strict=True)
        layers = [
            self._weights.layer(
                each.mixer,
                each.mlp_norm,
                cast(MLP | SparseMLP, each.mlp),
                input_norm=each.input_norm,
                rotary=None if rope is None else model.rotaries[rope],
                attention_output_norm=each.attention_output_norm,
                mlp_output_norm=each.mlp_output_norm,
                window=window,
                query_scales=model.query_scales.get(index),
            )
            for index, (each, rope, window) in enumerate(kinds)
        ]
        struct = self._weights.decoder(layers, model.config, model.embed_tokens, model.norm)
        all_reduce = all_reduce_of(model.embed_tokens.group)
        self._kernel = DecoderKernel(library, struct, model.rotary.max_positions, all_reduce)

    def enable_adapters(self, limits: AdapterLimits | None = None) -> NativeAdapters:
        """See Decoder; takes memory as adapters are loaded."""
        del limits
        model, kernel = self.torch_decoder, self._kernel
        if kernel.adapters is None:
            assert "_drafter" not in vars(self), "whole drafts were asked for before adapters"
            kernel.adapters = {}
        return NativeAdapters(cast(_Layers, model.layers), model.dtype, kernel.adapters)

    @property
    def device(self) -> torch.device:
        return self.torch_decoder.device

    @property
    def dtype(self) -> torch.dtype:
        return self.torch_decoder.dtype

    @property
    def vocab_slice(self) -> range:
        return self.torch_decoder.vocab_slice

    def new_kv_cache(self, num_slots: int) -> Tensor:
        """See Decoder; `num_slots` in whole blocks, in the layout of the kernels."""
        block_size, dtype = self.torch_decoder.attention.block_size, self.torch_decoder.dtype
        assert num_slots % block_size == 0
        return self._kernel.new_kv_cache(num_slots // block_size, block_size, dtype)

    def __call__(self, batch: ForwardBatch, kv_cache: Tensor) -> Tensor:
        """See Decoder."""
        return self.forward(batch, kv_cache)

    def forward(self, batch: ForwardBatch, kv_cache: Tensor) -> Tensor:
        """Write the batch's KV to `kv_cache`; return hidden states [T, hidden_size]."""
        return self._kernel.forward(batch, kv_cache)

    def forward_with_taps(
        self, batch: ForwardBatch, kv_cache: Tensor, taps: Sequence[int]
    ) -> HiddenStates:
        """See Decoder."""
        return self._kernel.forward_with_taps(batch, kv_cache, taps)

    def move_kv(self, kv_cache: Tensor, moves: Sequence[SlotMove]) -> None:
        """See Decoder."""
        self._kernel.move_kv(kv_cache, self.torch_decoder.attention.block_size, moves)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return this rank's logits [R, len(vocab_slice)]; hidden: [R, hidden_size]."""
        return self.torch_decoder.compute_logits(hidden)

    def compute_logits_and_argmax(self, hidden: Tensor, argmax: Argmax) -> tuple[Tensor, RowArgmax]:
        """See Decoder."""
        head = self.torch_decoder.lm_head
        if head.is_reduced or not head.transform.is_identity:
            return self.torch_decoder.compute_logits_and_argmax(hidden, argmax)
        return logits_and_argmax(self._head.native, hidden)

    @property
    def can_draft(self) -> bool:
        """See WholeDraftDecoder: kernels sample the products of the output head, of all ranks."""
        return self.torch_decoder.lm_head.transform.is_identity and self._drafter.can_draft

    def draft(
        self, batch: ForwardBatch, kv_cache: Tensor, counts: Sequence[int], params: SampleParams
    ) -> list[list[int]]:
        """See WholeDraftDecoder."""
        return self._drafter.draft(PairInputs(batch, None, kv_cache), counts, params)

    @cached_property
    def _drafter(self) -> DraftHeadKernel:
        kernel = self._kernel
        struct = DraftHeadStruct(
            decoder=kernel.model,
            lm_head=MatrixStruct.from_buffer_copy(self._head.native),
            target_tokens=self._draft_tokens.data_ptr(),
        )
        max_positions, all_reduce = kernel.max_positions, kernel.all_reduce
        drafter = DraftHeadKernel(kernel.library, struct, max_positions, all_reduce)
        drafter.adapters = kernel.adapters
        return drafter

    @cached_property
    def _draft_tokens(self) -> Tensor:
        """Return the tokens of this rank that have logits, ascending, int32."""
        own, places = self.vocab_slice, self.torch_decoder.lm_head.places
        if places is None:
            return torch.arange(own.start, own.stop, dtype=torch.int32)
        return (own.start + places).to(torch.int32)


class NativeHybridDecoder(NativeDecoder):
    """One rank of a decoder with recurrent layers on native kernels.

    The states are those of `torch_decoder`.
    """

    torch_decoder: HybridDecoder

    def forward(self, batch: ForwardBatch, kv_cache: Tensor) -> Tensor:
        """See NativeDecoder; commits states."""
        return self._kernel.forward(batch, kv_cache, self._states_of(batch))

    def forward_with_taps(
        self, batch: ForwardBatch, kv_cache: Tensor, taps: Sequence[int]
    ) -> HiddenStates:
        """See Decoder; commits states."""
        return self._kernel.forward_with_taps(batch, kv_cache, taps, self._states_of(batch))

    @property
    def can_draft(self) -> bool:
        """See WholeDraftDecoder: the states of drafts are those of later rows."""
        return False

    def _states_of(self, batch: ForwardBatch) -> PassStates:
        return PassStates(self.torch_decoder.states, batch)
