"""Decoder that runs each forward pass as one call of the native CPU kernels.

Built from the layers of a `CausalDecoder`, which own the weights. Hidden states and logits are
float32 for every weight format, and each row is the same bits alone, in any batch and with any
chunking of its prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.distributed.group import TensorParallelGroup
from specdec.kernels.cpu import SharedMemory, native_library
from specdec.kernels.cpu.decoder import (
    AllReduce,
    DecoderKernel,
    DecoderWeights,
    EmbeddingWeights,
    LayerWeights,
    PackedLinear,
)
from specdec.kernels.forward_batch import ModelInput
from specdec.kernels.sample import RowArgmax, logits_and_argmax
from specdec.models.layers import RMSNorm
from specdec.models.layers.matrix import Matrix, NativeMatrix
from specdec.models.llama import CausalDecoder, DecoderLayer


class NativeDecoder:
    """One rank of a decoder on native kernels; `forward` is a collective call."""

    def __init__(self, model: CausalDecoder, kernel: DecoderKernel) -> None:
        """kernel: built from the weights of `model`."""
        self.torch_decoder = model
        self._kernel = kernel
        head = model.lm_head.matrix
        assert isinstance(head, NativeMatrix)
        self._head = head

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

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return this rank's logits [R, len(vocab_slice)]; hidden: [R, hidden_size]."""
        return self._head.multiply(hidden)

    def compute_logits_and_argmax(self, hidden: Tensor) -> tuple[Tensor, RowArgmax]:
        """Return this rank's logits and their argmax; hidden: [R, hidden_size]."""
        return logits_and_argmax(self._head.native, hidden)


def native_decoder(model: CausalDecoder) -> NativeDecoder:
    """Return the model on native kernels; its matrices must be native."""
    library = native_library()
    assert library is not None, "the backend was selected without its library"
    kernel = DecoderKernel(library, _weights(model), _all_reduce(model.embed_tokens.group))
    return NativeDecoder(model, kernel)


def _all_reduce(group: TensorParallelGroup) -> AllReduce | None:
    if group.size == 1:
        return None
    collectives = group.collectives
    return collectives if isinstance(collectives, SharedMemory) else group.all_reduce


def _weights(model: CausalDecoder) -> DecoderWeights:
    cos, sin = model.rotary.tables()
    return DecoderWeights(
        embedding=_embedding(model),
        layers=tuple(map(_layer, _layers(model), model.windows)),
        final_norm=model.norm.weight.float(),
        norm_eps=model.norm.eps,
        cos=cos,
        sin=sin,
        heads=model.heads,
        head_dim=model.head_dim,
        rank=model.embed_tokens.group.rank,
    )


def _layers(model: CausalDecoder) -> list[DecoderLayer]:
    return [layer for layer in model.layers if isinstance(layer, DecoderLayer)]


def _layer(layer: DecoderLayer, window: int | None) -> LayerWeights:
    attention, mlp = layer.attention, layer.mlp
    return LayerWeights(
        qkv=_packed_linear(attention.qkv_proj.matrix, attention.qkv_proj.bias),
        output=_packed_linear(attention.o_proj.matrix, attention.o_proj.bias),
        gate_up=_packed_linear(mlp.gate_up_proj.matrix, mlp.gate_up_proj.bias),
        down=_packed_linear(mlp.down_proj.matrix, mlp.down_proj.bias),
        input_norm=layer.input_norm.weight.float(),
        mlp_norm=layer.mlp_norm.weight.float(),
        query_norm=_norm(attention.query_norm) if attention.has_qk_norm else None,
        key_norm=_norm(attention.key_norm) if attention.has_qk_norm else None,
        window=window,
    )


def _packed_linear(matrix: Matrix, bias: Tensor | None) -> PackedLinear:
    assert isinstance(matrix, NativeMatrix)
    return PackedLinear(matrix.native, None if bias is None else bias.float())


def _norm(norm: RMSNorm) -> Tensor:
    return norm.weight.float()


def _embedding(model: CausalDecoder) -> EmbeddingWeights:
    weight = model.embed_tokens.weight
    rows = weight.native if isinstance(weight, NativeMatrix) else weight
    return EmbeddingWeights(model.vocab_slice, rows)
