"""Decoder that runs each forward pass as one call of the native CPU kernels.

Built from the layers of a `CausalDecoder`, which own the weights. Hidden states and logits are
float32 for every weight format, and each row is the same bits alone, in any batch and with any
chunking of its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from specdec.distributed.group import TensorParallelGroup
from specdec.kernels.cpu import MatrixStruct, SharedMemory, native_library
from specdec.kernels.cpu.decoder import (
    FORMATS,
    AllReduce,
    DecoderKernel,
    DecoderStruct,
    EmbeddingStruct,
    LayerStruct,
)
from specdec.kernels.forward_batch import HiddenStates, ModelInput
from specdec.kernels.sample import RowArgmax, logits_and_argmax
from specdec.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from specdec.models.layers.matrix import Matrix, NativeMatrix
from specdec.models.llama import CausalDecoder, DecoderLayer


class NativeDecoder:
    """One rank of a decoder on native kernels; `forward` is a collective call."""

    def __init__(self, model: CausalDecoder) -> None:
        """Use the weights of `model`, whose matrices must be native."""
        library = native_library()
        assert library is not None, "the backend was selected without its library"
        self.torch_decoder = model
        self._head = _native(model.lm_head.matrix)
        self._kept: list[Tensor] = []
        cos, sin = model.rotary.tables()
        struct = self._decoder_struct(cos, sin)
        all_reduce = _all_reduce(model.embed_tokens.group)
        self._kernel = DecoderKernel(library, struct, len(cos), all_reduce)

    @property
    def device(self) -> torch.device:
        return self.torch_decoder.device

    @property
    def vocab_slice(self) -> range:
        return self.torch_decoder.vocab_slice

    def new_kv_cache(self, num_slots: int) -> Tensor:
        """See Decoder; `num_slots` in whole blocks, in the layout of the kernels."""
        block_size, dtype = self.torch_decoder.attention.block_size, self.torch_decoder.dtype
        assert num_slots % block_size == 0
        return self._kernel.new_kv_cache(num_slots // block_size, block_size, dtype)

    def __call__(self, batch: ModelInput, kv_cache: Tensor) -> Tensor:
        """See Decoder."""
        return self.forward(batch, kv_cache)

    def forward(self, batch: ModelInput, kv_cache: Tensor) -> Tensor:
        """Write the batch's KV to `kv_cache`; return hidden states [T, hidden_size]."""
        return self._kernel.forward(batch, kv_cache)

    def forward_with_taps(
        self, batch: ModelInput, kv_cache: Tensor, taps: Sequence[int]
    ) -> HiddenStates:
        """See Decoder."""
        return self._kernel.forward_with_taps(batch, kv_cache, taps)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return this rank's logits [R, len(vocab_slice)]; hidden: [R, hidden_size]."""
        return self._head.multiply(hidden)

    def compute_logits_and_argmax(self, hidden: Tensor) -> tuple[Tensor, RowArgmax]:
        """Return this rank's logits and their argmax; hidden: [R, hidden_size]."""
        return logits_and_argmax(self._head.native, hidden)

    def _decoder_struct(self, cos: Tensor, sin: Tensor) -> DecoderStruct:
        """Return the weights for the kernels; `_kept` owns those that the model does not."""
        model, heads = self.torch_decoder, self.torch_decoder.heads
        windows = zip(model.layers, model.windows, strict=True)
        layers = [
            self._layer_struct(cast(DecoderLayer, layer), window) for layer, window in windows
        ]
        return DecoderStruct(
            hidden_size=len(model.norm.weight),
            num_hidden_units=layers[0].down.in_features,
            num_heads=len(heads.query),
            num_kv_heads=len(heads.kv),
            heads_per_kv=heads.heads_per_kv,
            first_in_group=heads.first_in_group,
            head_dim=model.head_dim,
            num_layers=len(layers),
            norm_eps=model.norm.eps,
            rank=model.embed_tokens.group.rank,
            embedding=self._embedding_struct(),
            layers=(LayerStruct * len(layers))(*layers),
            final_norm=self._address(model.norm.weight),
            cos=self._address(cos),
            sin=self._address(sin),
        )

    def _layer_struct(self, layer: DecoderLayer, window: int | None) -> LayerStruct:
        attention, mlp = layer.attention, layer.mlp
        has_qk_norm = attention.has_qk_norm
        return LayerStruct(
            qkv=self._matrix_struct(attention.qkv_proj),
            output=self._matrix_struct(attention.o_proj),
            gate_up=self._matrix_struct(mlp.gate_up_proj),
            down=self._matrix_struct(mlp.down_proj),
            input_norm=self._address(layer.input_norm.weight),
            mlp_norm=self._address(layer.mlp_norm.weight),
            query_norm=self._address(attention.query_norm.weight) if has_qk_norm else None,
            key_norm=self._address(attention.key_norm.weight) if has_qk_norm else None,
            window=window or 0,
        )

    def _matrix_struct(self, linear: ColumnParallelLinear | RowParallelLinear) -> MatrixStruct:
        struct = MatrixStruct.from_buffer_copy(_native(linear.matrix).native)
        struct.bias = None if linear.bias is None else self._address(linear.bias)
        return struct

    def _embedding_struct(self) -> EmbeddingStruct:
        weight, tokens = self.torch_decoder.embed_tokens.weight, self.torch_decoder.vocab_slice
        struct = EmbeddingStruct(first_token=tokens.start, num_tokens=len(tokens))
        if isinstance(weight, NativeMatrix):
            struct.packed, struct.format = weight.native.packed, weight.native.format
        else:
            assert weight.is_contiguous()
            struct.table, struct.format = weight.data_ptr(), FORMATS[weight.dtype]
        return struct

    def _address(self, values: Tensor) -> int:
        """Return the address of values in float32, which are kept in memory."""
        kept = values.float().contiguous()
        self._kept.append(kept)
        return kept.data_ptr()


def _all_reduce(group: TensorParallelGroup) -> AllReduce | None:
    if group.size == 1:
        return None
    collectives = group.collectives
    return collectives if isinstance(collectives, SharedMemory) else group.all_reduce


def _native(matrix: Matrix) -> NativeMatrix:
    assert isinstance(matrix, NativeMatrix)
    return matrix
