"""Weights of layers as the structs of the native kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from specdec.kernels.cpu import MatrixStruct, SharedMemory
from specdec.kernels.cpu.decoder import (
    AllReduce,
    DecoderStruct,
    EmbeddingStruct,
    ExpertStruct,
    LatentShapeStruct,
    LatentWeightsStruct,
    LayerStruct,
    NormStruct,
    TraitsStruct,
)
from specdec.kernels.cpu.matrix import FORMATS
from specdec.kernels.cpu.recurrence import (
    RecurrenceKind,
    RecurrentShapeStruct,
    RecurrentWeightsStruct,
)
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.attention.latent import Latent
from specdec.models.config.model_config import ModelConfig
from specdec.models.config.recurrent import GatedDelta, Recurrent, ShortConvolution, StateSpace
from specdec.models.config.traits import (
    Activation,
    DecoderTraits,
    Experts,
    NormKind,
    QkNorm,
)
from specdec.models.layers.decoder_layer import Attention
from specdec.models.layers.latent_attention import LatentAttention
from specdec.models.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabEmbedding,
    embedding_scale,
)
from specdec.models.layers.matrix import Matrix, NativeMatrix
from specdec.models.layers.mixture import GatedExpert, SparseMLP
from specdec.models.layers.mlp import MLP
from specdec.models.layers.norm import LayerNorm, RMSNorm
from specdec.models.layers.qk_norm import counted_kv_heads
from specdec.models.layers.recurrences.gated_delta import GatedDeltaLayer
from specdec.models.layers.recurrences.recurrent_layer import RecurrentLayer
from specdec.models.layers.recurrences.short_convolution import ShortConvolutionLayer
from specdec.models.layers.recurrences.state_space import StateSpaceLayer
from specdec.models.layers.rotary import RotaryEmbedding

_NATIVE_NORMS = {QkNorm.ROTATED_HEAD: QkNorm.HEAD}
"""Norms that the kernels have under another name, with weights of ones."""


class NativeWeights:
    """Makes structs of torch layers, and owns what the layers do not: norms and biases in float32.

    Layers, whose matrices must be native, and this object must outlive the structs.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._structs: list[ctypes.Structure | ctypes.Array[ExpertStruct]] = []
        self._tables: dict[RotaryEmbedding, tuple[int, int]] = {}

    def decoder(
        self,
        layers: Sequence[LayerStruct],
        config: ModelConfig,
        embedding: VocabEmbedding,
        final_norm: nn.Module | None,
        first_position: int = 0,
    ) -> DecoderStruct:
        """Return the struct of this rank's layers. first_position: that has KV."""
        group = embedding.group
        shards = config.head_shards(group.size)
        heads = shards[group.rank]
        if config.latent is not None:
            heads = heads.sharing_one_key()
        return DecoderStruct(
            **_unit_counts(layers),
            hidden_size=config.hidden_size,
            num_heads=len(heads.query),
            num_kv_heads=len(heads.kv),
            heads_per_kv=heads.heads_per_kv,
            first_in_group=heads.first_in_group,
            head_dim=config.head_dim,
            rotary_dim=config.rotary_dim,
            num_layers=len(layers),
            num_model_heads=config.num_heads,
            num_model_kv_heads=config.num_kv_heads,
            first_counted_kv_head=counted_kv_heads(shards, group.rank).start - heads.kv.start,
            first_position=first_position,
            norm_eps=config.rms_norm_eps,
            rank=group.rank,
            traits=traits_struct(config.traits, config.head_dim, embedding.dtype, config.experts),
            latent=latent_struct(config.latent),
            recurrent=recurrent_struct(config.recurrent, group.rank, group.size),
            embedding=embedding_struct(embedding),
            layers=(LayerStruct * len(layers))(*layers),
            final_norm=self.norm(final_norm),
        )

    def layer(
        self,
        attention: Attention | LatentAttention | RecurrentLayer,
        mlp_norm: nn.Module,
        mlp: MLP | SparseMLP,
        *,
        input_norm: nn.Module | None,
        rotary: RotaryEmbedding | None,
        attention_output_norm: nn.Module | None = None,
        mlp_output_norm: nn.Module | None = None,
        window: int | None,
        sees_ahead: bool = False,
        query_scales: Tensor | None = None,
    ) -> LayerStruct:
        """Return the struct of a layer.

        rotary: None: positions do not enter attention. window: None: all tokens up to a query are
        visible to it. sees_ahead: whether those after it in the pass are visible too.
        """
        cos, sin = (None, None) if rotary is None else self._rotary_tables(rotary)
        struct = LayerStruct(
            input_norm=self.norm(input_norm),
            mlp_norm=self.norm(mlp_norm),
            attention_output_norm=self.norm(attention_output_norm),
            mlp_output_norm=self.norm(mlp_output_norm),
            cos=cos,
            sin=sin,
            window=window or 0,
            sees_ahead=sees_ahead,
            query_scales=None if query_scales is None else self.address(query_scales),
        )
        self._add_mixer(attention, struct)
        self._add_mlp(mlp, struct)
        return struct

    def _add_mixer(
        self, mixer: Attention | LatentAttention | RecurrentLayer, layer: LayerStruct
    ) -> None:
        """Set the projections of the half that mixes tokens, and what it has between them."""
        if not isinstance(mixer, Attention | LatentAttention):
            layer.qkv, layer.output = self.matrix(mixer.in_proj), self.matrix(mixer.out_proj)
            return self._add_recurrence(mixer, layer)
        layer.qkv, layer.output = self.matrix(mixer.qkv_proj), self.matrix(mixer.o_proj)
        if isinstance(mixer, LatentAttention):
            return self._add_latents(mixer, layer)
        return self._add_heads(mixer, layer)

    def _add_heads(self, attention: Attention, layer: LayerStruct) -> None:
        """Set the norms and sinks of heads."""
        if attention.has_qk_norm and (layer.cos or not attention.norms_rotated):
            layer.query_norm = self.address(attention.query_norm.weight)
            layer.key_norm = self.address(attention.key_norm.weight)
        if attention.sinks is not None:
            layer.sinks = self.address(attention.sinks)

    def _add_latents(self, attention: LatentAttention, layer: LayerStruct) -> None:
        """Set what latent attention has beside its first and last projection."""
        expansion = attention.expansion.native
        struct = LatentWeightsStruct(
            kv_norm=self.address(attention.kv_norm.weight),
            to_keys=expansion.to_keys.native,
            to_values=expansion.to_values.native,
        )
        if attention.query_up is not None:
            struct.query_up = self.matrix(attention.query_up)
            struct.query_norm = self.address(attention.query_norm.weight)
        self._structs.append(struct)
        layer.latent = ctypes.pointer(struct)

    def _add_mlp(self, mlp: MLP | SparseMLP, layer: LayerStruct) -> None:
        """Set the MLP of a layer's struct, with its activation function's numbers, or a mixture."""
        if isinstance(mlp, SparseMLP):
            self._add_experts(mlp, layer)
            return
        layer.gate_up, layer.down = self._mlp(mlp)
        if mlp.xielu is not None:
            layer.activation = self.address(torch.tensor(mlp.xielu))

    def _add_recurrence(self, recurrence: RecurrentLayer, layer: LayerStruct) -> None:
        """Set what a recurrence has beside its projections."""
        known = ShortConvolutionLayer | GatedDeltaLayer | StateSpaceLayer
        assert isinstance(recurrence, known), "torch runs it"
        weight, bias = recurrence.convolution.weight, recurrence.convolution.bias
        struct = RecurrentWeightsStruct(taps=self.address(weight.t()))
        if bias is not None:
            struct.convolution_bias = self.address(bias)
        if not isinstance(recurrence, ShortConvolutionLayer):
            struct.decay_rates = self.address(recurrence.decay_rate)
            struct.step_biases = self.address(recurrence.dt_bias)
            assert recurrence.norm is not None, "torch runs it"
            struct.norm = self.address(recurrence.norm)
        if isinstance(recurrence, StateSpaceLayer):
            struct.skips = self.address(recurrence.skip)
        self._structs.append(struct)
        layer.recurrent = ctypes.pointer(struct)

    def _mlp(self, mlp: MLP) -> tuple[MatrixStruct, MatrixStruct]:
        return self.matrix(mlp.gate_up_proj), self.matrix(mlp.down_proj)

    def _add_experts(self, mixture: SparseMLP, layer: LayerStruct) -> None:
        """Set the router and the experts of a layer's struct."""
        experts = [ExpertStruct(*self._mlp(each)) for each in cast(Sequence[MLP], mixture.experts)]
        layer.router, layer.first_expert = self.matrix(mixture.router), mixture.own.start
        layer.num_own_experts = len(experts)
        array = (ExpertStruct * len(experts))(*experts)
        self._structs.append(array)
        layer.experts = array
        if mixture.choice_bias is not None:
            layer.choice_bias = self.address(mixture.choice_bias)
        if mixture.shared is not None:
            self._add_shared(cast(MLP | GatedExpert, mixture.shared), layer)

    def _add_shared(self, expert: MLP | GatedExpert, layer: LayerStruct) -> None:
        """Set the experts of every token, unless other ranks have all of their hidden units."""
        if isinstance(expert, GatedExpert):
            layer.shared_gate, mlp = self.address(expert.gate), cast(MLP, expert.expert)
        else:
            mlp = expert
        shared = (ExpertStruct * 1)(ExpertStruct(*self._mlp(mlp)))
        if shared[0].down.in_features:
            self._structs.append(shared)
            layer.shared = shared

    def matrix(self, linear: ColumnParallelLinear | RowParallelLinear) -> MatrixStruct:
        """Return the struct of a linear layer, with its bias."""
        struct = MatrixStruct.from_buffer_copy(native_matrix(linear.matrix).native)
        struct.bias = None if linear.bias is None else self.address(linear.bias)
        return struct

    def norm(self, norm: nn.Module | None) -> NormStruct:
        """Return the struct of a norm of hidden states; an identity or None has no weight."""
        if norm is None or isinstance(norm, nn.Identity):
            return NormStruct()
        assert isinstance(norm, RMSNorm | LayerNorm)
        bias = norm.bias if isinstance(norm, LayerNorm) else None
        return NormStruct(self.address(norm.weight), None if bias is None else self.address(bias))

    def _rotary_tables(self, rotary: RotaryEmbedding) -> tuple[int, int]:
        """Return the addresses of cosines and sines, which layers share."""
        if rotary not in self._tables:
            cos, sin = rotary.tables()
            self._tables[rotary] = self.address(cos), self.address(sin)
        return self._tables[rotary]

    def address(self, values: Tensor) -> int:
        """Return the address of values in float32, which are kept in memory."""
        kept = values.float().contiguous()
        self._kept.append(kept)
        return kept.data_ptr()


def traits_struct(
    traits: DecoderTraits, head_dim: int, dtype: torch.dtype, experts: Experts | None = None
) -> TraitsStruct:
    """Return the traits of layers for the kernels. dtype: of the model."""
    scale = traits.attention_scale
    if scale is None:
        scale = float(np.float32(1) / np.sqrt(np.float32(head_dim)))
    routing = None if experts is None else experts.routing
    return TraitsStruct(
        norm=list(NormKind).index(traits.norm),
        qk_norm=list(QkNorm).index(_NATIVE_NORMS.get(traits.qk_norm, traits.qk_norm)),
        activation=list(Activation).index(traits.activation),
        has_gate=traits.has_gate,
        has_attention_gate=traits.has_attention_gate,
        is_parallel=traits.is_parallel,
        attention_scale=scale,
        attention_softcap=traits.attention_softcap or 0.0,
        embedding_scale=embedding_scale(traits, dtype),
        residual_scale=traits.residual_scale,
        num_experts=0 if experts is None else experts.count,
        experts_per_token=0 if experts is None else experts.num_per_token,
        normalizes_experts=experts is not None and experts.normalizes,
        scores_by_sigmoid=routing is not None and routing.is_sigmoid,
        num_expert_groups=1 if routing is None else routing.num_groups,
        num_chosen_groups=1 if routing is None else routing.num_chosen_groups,
        routing_scale=1.0 if routing is None else routing.scale,
        scales_expert_inputs=experts is not None and experts.scales_inputs,
        adds_two_best=routing is not None and routing.adds_two_best,
        rotates_before_norms=traits.rotates_before_norms,
    )


def latent_struct(latent: Latent | None) -> LatentShapeStruct:
    """Return the sizes of latent attention for the kernels."""
    if latent is None:
        return LatentShapeStruct()
    query_rank = latent.query_rank or 0
    return LatentShapeStruct(latent.rank, query_rank, latent.plain_dim, latent.value_dim)


def recurrent_struct(
    recurrent: Recurrent | None, rank: int, tensor_parallel_size: int
) -> RecurrentShapeStruct:
    """Return the sizes of a rank's recurrent layers for the kernels."""
    if recurrent is None:
        return RecurrentShapeStruct()
    own, kind = recurrent.units(rank, tensor_parallel_size), recurrent.kind
    struct = RecurrentShapeStruct(num_layers=len(recurrent.layers), kernel_size=kind.kernel_size)
    match kind:
        case ShortConvolution():
            struct.kind = RecurrenceKind.SHORT_CONVOLUTION
            struct.num_channels = len(own)
        case GatedDelta():
            struct.kind, struct.num_keys = RecurrenceKind.GATED_DELTA, len(own)
            struct.num_channels = len(own) * kind.unit_channels
            struct.heads_per_key = kind.values_per_key
            struct.num_heads = len(own) * kind.values_per_key
            struct.key_dim, struct.value_dim = kind.key_dim, kind.value_dim
        case StateSpace():
            struct.kind, struct.num_keys = RecurrenceKind.STATE_SPACE, kind.num_groups
            struct.num_channels = len(own) * kind.head_dim + 2 * kind.group_channels
            struct.heads_per_key = kind.num_heads // kind.num_groups
            struct.num_heads, struct.first_head = len(own), own.start
            struct.key_dim, struct.value_dim = kind.state_dim, kind.head_dim
    return struct


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


def _unit_counts(layers: Sequence[LayerStruct]) -> dict[str, int]:
    """Return the most units of a feed-forward network, of one expert, and of shared experts."""
    return {
        "num_hidden_units": max(layer.down.in_features for layer in layers),
        "num_expert_units": max(
            layer.experts[0].down.in_features if layer.num_own_experts else 0 for layer in layers
        ),
        "num_shared_units": max(
            layer.shared[0].down.in_features if layer.shared else 0 for layer in layers
        ),
    }
