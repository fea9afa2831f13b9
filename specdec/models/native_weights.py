"""Weights of layers as the structs of the native kernels."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specdec.kernels.cpu import MatrixStruct, SharedMemory
from specdec.kernels.cpu.decoder import (
    FORMATS,
    AllReduce,
    DecoderStruct,
    EmbeddingStruct,
    LayerStruct,
)
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config import ModelConfig
from specdec.models.layers.linear import (
    ColumnParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabEmbedding,
)
from specdec.models.layers.matrix import Matrix, NativeMatrix
from specdec.models.layers.rotary import RotaryEmbedding
from specdec.models.llama import MLP, Attention


class NativeWeights:
    """Makes structs of torch layers, and owns what the layers do not: norms and biases in float32.

    Layers, whose matrices must be native, and this object must outlive the structs.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def decoder(
        self,
        layers: Sequence[LayerStruct],
        config: ModelConfig,
        embedding: VocabEmbedding,
        rotary: RotaryEmbedding,
        final_norm: RMSNorm | None,
        first_position: int = 0,
    ) -> DecoderStruct:
        """Return the struct of this rank's layers. first_position: that has KV."""
        cos, sin = rotary.tables()
        group = embedding.group
        heads = config.head_shards(group.size)[group.rank]
        return DecoderStruct(
            hidden_size=config.hidden_size,
            num_hidden_units=layers[0].down.in_features,
            num_heads=len(heads.query),
            num_kv_heads=len(heads.kv),
            heads_per_kv=heads.heads_per_kv,
            first_in_group=heads.first_in_group,
            head_dim=config.head_dim,
            num_layers=len(layers),
            first_position=first_position,
            norm_eps=config.rms_norm_eps,
            rank=group.rank,
            embedding=embedding_struct(embedding),
            layers=(LayerStruct * len(layers))(*layers),
            final_norm=self.norm(final_norm),
            cos=self.address(cos),
            sin=self.address(sin),
        )

    def layer(
        self,
        attention: Attention,
        mlp_norm: RMSNorm,
        mlp: MLP,
        *,
        input_norm: RMSNorm | None,
        window: int | None,
        sees_ahead: bool = False,
    ) -> LayerStruct:
        """Return the struct of a layer.

        window: None: all tokens up to a query are visible to it. sees_ahead: whether those behind
        it in the pass are visible too.
        """
        has_qk_norm = attention.has_qk_norm
        return LayerStruct(
            qkv=self.matrix(attention.qkv_proj),
            output=self.matrix(attention.o_proj),
            gate_up=self.matrix(mlp.gate_up_proj),
            down=self.matrix(mlp.down_proj),
            input_norm=self.norm(input_norm),
            mlp_norm=self.norm(mlp_norm),
            query_norm=self.norm(attention.query_norm) if has_qk_norm else None,
            key_norm=self.norm(attention.key_norm) if has_qk_norm else None,
            window=window or 0,
            sees_ahead=sees_ahead,
        )

    def matrix(self, linear: ColumnParallelLinear | RowParallelLinear) -> MatrixStruct:
        """Return the struct of a linear layer, with its bias."""
        struct = MatrixStruct.from_buffer_copy(native_matrix(linear.matrix).native)
        struct.bias = None if linear.bias is None else self.address(linear.bias)
        return struct

    def norm(self, norm: RMSNorm | None) -> int | None:
        """Return the address of a norm's weights; None without a norm."""
        return None if norm is None else self.address(norm.weight)

    def address(self, values: Tensor) -> int:
        """Return the address of values in float32, which are kept in memory."""
        kept = values.float().contiguous()
        self._kept.append(kept)
        return kept.data_ptr()


def embedding_struct(embedding: VocabEmbedding) -> EmbeddingStruct:
    """Return the struct of this rank's rows of an embedding."""
    weight, tokens = embedding.weight, embedding.tokens
    struct = EmbeddingStruct(first_token=tokens.start, num_tokens=len(tokens))
    if isinstance(weight, NativeMatrix):
        struct.packed, struct.format = weight.native.packed, weight.native.format
    else:
        assert weight.is_contiguous()
        struct.table, struct.format = weight.data_ptr(), FORMATS[weight.dtype]
    return struct


def native_matrix(matrix: Matrix) -> NativeMatrix:
    """Return a matrix that must be native."""
    assert isinstance(matrix, NativeMatrix)
    return matrix


def all_reduce_of(group: TensorParallelGroup) -> AllReduce | None:
    """Return how the kernels sum over the ranks; None for a single rank."""
    if group.size == 1:
        return None
    collectives = group.collectives
    return collectives if isinstance(collectives, SharedMemory) else group.all_reduce
