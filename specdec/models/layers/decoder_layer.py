"""A layer of the decoder: attention and feed-forward network of one rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specdec.kernels import AttentionPlan, PagedAttention, Rotation
from specdec.kernels.backend import KernelBackend, attention_kind
from specdec.kernels.reference.attention import QueryKeyNorms
from specdec.kernels.reference.indexed_attention import IndexedAttention
from specdec.kernels.reference.kv_scales import UNIT_SCALES
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.decoder_tensors import layer_traits
from specdec.models.config.model_config import ModelConfig
from specdec.models.config.traits import QkNorm
from specdec.models.layers.latent_attention import LatentAttention
from specdec.models.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    WeightPart,
    weight_parts,
)
from specdec.models.layers.mixture import LatentSparseMLP, SparseMLP
from specdec.models.layers.mlp import MLP, ScaledMLP
from specdec.models.layers.norm import RMSNorm, read_norm
from specdec.models.layers.qk_norm import read_qk_norms
from specdec.models.layers.recurrences.recurrent import (
    AttentionBesideRecurrence,
    read_recurrent_layer,
)
from specdec.models.layers.recurrences.recurrent_layer import RecurrentLayer
from specdec.models.layers.rotary import rotary_halves
from specdec.models.weights.checkpoint import CheckpointReader
from specdec.types.sharding import HeadShard, head_rows


class Attention(nn.Module):
    """Self-attention of this rank's heads over paged KV.

    Some families multiply its result by a sigmoid of each value (arXiv 2505.06708).
    """

    def __init__(
        self,
        config: ModelConfig,
        reader: CheckpointReader,
        prefix: str,
        group: TensorParallelGroup,
        input_size: int | None = None,
    ) -> None:
        """input_size: width of the input, if it is not `hidden_size`."""
        super().__init__()
        heads = config.head_shards(group.size)[group.rank]
        self.kv_scales = UNIT_SCALES  # of a KV cache of 8-bit floats
        self.num_heads, self.num_kv_heads = len(heads.query), len(heads.kv)
        self.head_dim = config.head_dim
        self.num_gates = self.num_heads * config.traits.has_attention_gate
        self.has_qk_norm = config.has_qk_norm
        query_size = config.num_heads * config.head_dim
        parts = _qkv_parts(config, prefix, heads)
        self.qkv_proj = ColumnParallelLinear(reader, input_size or config.hidden_size, parts)
        if config.has_qk_norm:
            self.query_norm, self.key_norm = read_qk_norms(config, reader, prefix, group)
        self._rotates_first = config.has_qk_norm and config.traits.rotates_before_norms
        self.norms_rotated = config.traits.qk_norm is QkNorm.ROTATED_HEAD
        is_fused = config.has_qk_norm and not self._rotates_first
        self._fused_norms = self._norms_by_head() if is_fused else None
        self.sinks: Tensor | None = None
        if config.traits.has_sinks:
            own = range(heads.query.start, heads.query.stop)
            self.sinks = reader.read(f"{prefix}.sinks", (config.num_heads,), rows=own)
        self.o_proj = RowParallelLinear(
            reader,
            f"{prefix}.{config.traits.names.attention_output}",
            (config.hidden_size, query_size),
            head_rows(heads.query, config.head_dim),
            group,
            has_bias=config.has_output_bias,
        )

    def forward(
        self,
        x: Tensor,  # [T, input_size]
        residual: Tensor | None,  # [T, hidden_size]
        rotation: Rotation | None,
        kv_cache: Tensor,  # [num_slots, 2, num_kv_heads, head_dim]
        attention: PagedAttention,
        plan: AttentionPlan,
        query_scale: Tensor | None = None,  # [T, 1, 1]
    ) -> Tensor:
        """Return [T, hidden_size], plus the residual if given."""
        heads, gates = self._project(x, rotation)
        if query_scale is not None:
            assert self._fused_norms is None, "norms would cancel the factors"
            heads[:, : self.num_heads] *= query_scale
        attended = attention.rotate_and_run(
            heads,
            self._fused_norms,
            None if self._rotates_first else rotation,
            kv_cache,
            plan,
            self.sinks,
            self.kv_scales,
        )
        if self.num_gates:
            attended = attended * gates.sigmoid()
        output: Tensor = self.o_proj(attended.flatten(1), residual)
        return output

    def store(
        self,
        x: Tensor,  # [T, input_size]
        rotation: Rotation | None,
        kv_cache: Tensor,
        attention: PagedAttention,
        slots: Tensor,  # [T] int64
    ) -> None:
        """Write the keys and values of x, to which no query attends in this pass."""
        norms, scales = self._fused_norms, self.kv_scales
        (heads, _), left = self._project(x, rotation), None if self._rotates_first else rotation
        attention.rotate_and_store(heads, norms, left, kv_cache, slots, scales)

    def _project(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
        """Return queries, keys and values with norms not by attention, and gates.

        Both are [T, heads, head_dim].
        """
        projected = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        heads, gates = projected, projected[:, :0]
        if self.num_gates:
            gates, heads = projected.tensor_split((self.num_gates,), 1)
            heads = heads.contiguous()
        if self._rotates_first and rotation is not None:
            rotation.apply_(heads[:, : self.num_heads + self.num_kv_heads])
        has_norms = self.has_qk_norm and self._fused_norms is None
        if has_norms and (rotation is not None or not self.norms_rotated):
            query, key, _ = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), 1)
            query.copy_(self.query_norm(query))
            key.copy_(self.key_norm(key))
        return heads, gates

    def _norms_by_head(self) -> QueryKeyNorms | None:
        """Return the norms, if they are such as attention applies itself."""
        query, key = self.query_norm, self.key_norm
        is_by_head = isinstance(query, RMSNorm) and isinstance(key, RMSNorm)
        return QueryKeyNorms(query, key) if is_by_head else None


def _qkv_parts(config: ModelConfig, prefix: str, heads: HeadShard) -> list[WeightPart]:
    traits, dim = config.traits, config.head_dim
    query, gates = dim * (1 + traits.has_gates_beside_queries), list[WeightPart]()
    if traits.names.attention_gate is not None:
        name, rows = f"{prefix}.{traits.names.attention_gate}", head_rows(heads.query, dim)
        gates.append(WeightPart(name, dim * config.num_heads, rows))
    order = rotary_halves(dim, config.rotary_dim) if traits.is_rope_interleaved else None
    query_order = _gates_first(dim, len(heads.query)) if traits.has_gates_beside_queries else order
    parts = weight_parts(
        prefix,
        traits.names.qkv,
        [query * config.num_heads, *[dim * config.num_kv_heads] * 2],
        [head_rows(heads.query, query), *[head_rows(heads.kv, dim)] * 2],
        has_bias=config.has_qkv_bias,
        orders=(query_order, order, None),
    )
    return [*gates, *parts]


def _gates_first(head_dim: int, num_heads: int) -> tuple[int, ...]:
    """Return the rows of queries, each of which is stored before its gate, after all gates."""
    return tuple(
        (2 * head + half) * head_dim + row
        for half in (1, 0)
        for head in range(num_heads)
        for row in range(head_dim)
    )


def read_mlp(
    config: ModelConfig,
    reader: CheckpointReader,
    prefix: str,
    group: TensorParallelGroup,
    index: int,
) -> nn.Module:
    """Read the feed-forward network of layer `index`. prefix: of the layer's tensors."""
    names, experts = config.traits.names, config.experts
    if experts is not None and index in experts.layers:
        kind = SparseMLP if experts.latent_size is None else LatentSparseMLP
        return kind(config, reader, names.mixture_prefix(prefix), group)
    is_plain = config.traits.gate_scale == config.traits.mlp_scale == 1.0
    return (MLP if is_plain else ScaledMLP)(config, reader, f"{prefix}.{names.mlp}", group)


def layer_attention(
    config: ModelConfig,
    heads: HeadShard,
    backend: KernelBackend,
    block_size: int,
    device: torch.device,
) -> PagedAttention:
    """Return the paged attention of a decoder's layers. heads: of this rank."""
    latent, traits = config.latent, config.traits
    if latent is not None and latent.indexer is not None:
        assert backend is KernelBackend.TORCH, "only torch attends to chosen tokens"
        return IndexedAttention(
            heads.sharing_one_key(),
            config.head_dim,
            block_size,
            device,
            scale=traits.attention_scale,
            latent_rank=latent.rank,
            num_chosen=latent.indexer.num_chosen,
        )
    return attention_kind(backend)(
        heads if latent is None else heads.sharing_one_key(),
        config.head_dim,
        block_size,
        device,
        scale=traits.attention_scale,
        softcap=traits.attention_softcap,
        latent_rank=None if latent is None else latent.rank,
    )


def read_attention(
    config: ModelConfig,
    reader: CheckpointReader,
    prefix: str,
    group: TensorParallelGroup,
    index: int,
) -> Attention | LatentAttention:
    """Read the attention of layer `index`. prefix: of the layer's tensors."""
    name = f"{prefix}.{config.traits.names.attention}"
    if config.latent is not None:
        indexer = config.latent.indexer
        has_indexer = indexer is not None and index in indexer.layers
        return LatentAttention(config, reader, name, group, has_indexer=has_indexer)
    return Attention(config, reader, name, group)


def _read_mixer(
    config: ModelConfig,
    reader: CheckpointReader,
    prefix: str,
    group: TensorParallelGroup,
    index: int,
) -> Attention | LatentAttention | RecurrentLayer | AttentionBesideRecurrence:
    """Read the attention of layer `index`, the recurrence in its place, or both."""
    recurrent = config.recurrent
    if recurrent is None or index not in recurrent.layers:
        return read_attention(config, reader, prefix, group, index)
    found = read_recurrent_layer(config, reader, prefix, group)
    if recurrent.beside is None:
        return found
    attention = read_attention(config, reader, prefix, group, index)
    return AttentionBesideRecurrence(attention, found, recurrent.beside)


class DecoderLayer(nn.Module):
    """Attention and MLP, each with a residual connection, and norms by the family's traits.

    attention: or a recurrence in its place, or both.
    """

    def __init__(
        self,
        config: ModelConfig,
        reader: CheckpointReader,
        prefix: str,
        group: TensorParallelGroup,
        index: int,
    ) -> None:
        """Read layer `index`. prefix: of its tensors."""
        super().__init__()
        self.traits = traits = layer_traits(config, index)
        names = traits.names

        def norm(name: str, *, exists: bool) -> nn.Module:
            size, eps = config.hidden_size, config.rms_norm_eps
            if not exists:
                return nn.Identity()
            return read_norm(reader, f"{prefix}.{name}", size, eps, traits)

        has_mlp_norm = traits.has_input_norms and not traits.is_parallel
        self.input_norm = norm(names.input_norm, exists=traits.has_input_norms)
        self.attention = _read_mixer(config, reader, prefix, group, index)
        self.attention_output_norm = norm(
            names.attention_output_norm, exists=traits.has_output_norms
        )
        self.mlp_norm = norm(names.mlp_norm, exists=has_mlp_norm)
        self.mlp = read_mlp(config, reader, prefix, group, index)
        self.mlp_output_norm = norm(names.mlp_output_norm, exists=traits.has_output_norms)
        self._fused_norm: RMSNorm | None = None
        if isinstance(self.mlp_norm, RMSNorm) and not traits.changes_outputs:
            self._fused_norm = self.mlp_norm if self.mlp_norm.is_fused else None
        if self._fused_norm is not None and isinstance(self.mlp, MLP):
            self.mlp.overwrite_residual()  # which the fused norm has made, and nothing else reads

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        """Return [T, hidden_size]; x: the same shape.

        context: what `attention` takes after the residual.
        """
        normed = self.input_norm(x)
        output: Tensor
        if self._fused_norm is not None:
            x, normed = self._fused_norm.add(x, self.attention(normed, None, *context))
            output = self.mlp(normed, x)
            return output
        if not self.traits.changes_outputs:
            x = self.attention(normed, x, *context)
            output = self.mlp(normed if self.traits.is_parallel else self.mlp_norm(x), x)
            return output
        x = self._join(x, self.attention_output_norm(self.attention(normed, None, *context)))
        output = self._join(x, self.mlp_output_norm(self.mlp(self.mlp_norm(x), None)))
        return output

    @property
    def grouped_attention(self) -> Attention:
        """The attention of a layer without latents, as native kernels and draft heads need it."""
        assert isinstance(self.attention, Attention), "the layer has latent attention"
        return self.attention

    @property
    def mixer(self) -> Attention | LatentAttention | RecurrentLayer:
        """The attention or the recurrence of a layer, as native kernels need it."""
        assert isinstance(self.attention, Attention | LatentAttention | RecurrentLayer)
        return self.attention

    def _join(self, residual: Tensor, x: Tensor) -> Tensor:
        return torch.add(residual, x, alpha=self.traits.residual_scale)
