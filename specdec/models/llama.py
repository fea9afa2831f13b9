"""Llama decoder (Touvron et al. 2023) with tensor parallelism.

The other families are the same decoder with the biases, windows and traits of ModelConfig.

Each rank has the heads of its KV groups, its shard of the MLP's hidden units and its shard of the
vocabulary, and reads only these from the checkpoint. Hidden states are equal on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from specdec.kernels import AttentionPlan, PagedAttention, Rotation
from specdec.kernels.attention import QueryKeyNorms
from specdec.kernels.backend import paged_attention
from specdec.kernels.device_batch import DeviceBatch
from specdec.kernels.forward_batch import HiddenStates, ModelInput, SlotMove, on_device
from specdec.kernels.moves import move_kv
from specdec.kernels.sample import RowArgmax, row_argmax
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config import ModelConfig
from specdec.models.layers.latent_attention import LatentAttention
from specdec.models.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabEmbedding,
    VocabHead,
    WeightPart,
    embedding_scale,
    weight_parts,
)
from specdec.models.layers.mixture import SparseMLP
from specdec.models.layers.mlp import MLP
from specdec.models.layers.norm import RMSNorm, read_norm
from specdec.models.layers.qk_norm import read_qk_norms
from specdec.models.layers.rotary import RotaryEmbedding, rotary_halves
from specdec.models.lora.torch_adapters import TorchAdapters
from specdec.models.rope import Rope
from specdec.models.weights.checkpoint import CheckpointReader
from specdec.types.sharding import HeadShard, head_rows
from specdec.types.validation import require_range


class Attention(nn.Module):
    """Self-attention of this rank's heads over paged KV."""

    def __init__(
        self,
        config: ModelConfig,
        reader: CheckpointReader,
        prefix: str,
        heads: HeadShard,
        group: TensorParallelGroup,
        input_size: int | None = None,
    ) -> None:
        """input_size: width of the input, if it is not `hidden_size`."""
        super().__init__()
        self.num_heads, self.num_kv_heads = len(heads.query), len(heads.kv)
        self.head_dim = config.head_dim
        self.has_qk_norm = config.has_qk_norm
        query_size = config.num_heads * config.head_dim
        parts = _qkv_parts(config, prefix, heads)
        self.qkv_proj = ColumnParallelLinear(reader, input_size or config.hidden_size, parts)
        if config.has_qk_norm:
            self.query_norm, self.key_norm = read_qk_norms(config, reader, prefix, group)
        self._fused_norms = self._norms_by_head() if config.has_qk_norm else None
        self.sinks: Tensor | None = None
        if config.traits.has_sinks:
            own = range(heads.query.start, heads.query.stop)
            self.sinks = reader.read(f"{prefix}.sinks", (config.num_heads,), rows=own)
        self.o_proj = RowParallelLinear(
            reader,
            f"{prefix}.o_proj",
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
    ) -> Tensor:
        """Return [T, hidden_size], plus the residual if given."""
        heads = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        if self.has_qk_norm and self._fused_norms is None:
            query, key, _ = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), 1)
            query.copy_(self.query_norm(query))
            key.copy_(self.key_norm(key))
        attended = attention.rotate_and_run(
            heads, self._fused_norms, rotation, kv_cache, plan, self.sinks
        )
        output: Tensor = self.o_proj(attended.flatten(1), residual)
        return output

    def _norms_by_head(self) -> QueryKeyNorms | None:
        """Return the norms, if they are such as attention applies itself."""
        query, key = self.query_norm, self.key_norm
        is_by_head = isinstance(query, RMSNorm) and isinstance(key, RMSNorm)
        return QueryKeyNorms(query, key) if is_by_head else None


def _qkv_parts(config: ModelConfig, prefix: str, heads: HeadShard) -> list[WeightPart]:
    traits, dim = config.traits, config.head_dim
    order = rotary_halves(dim, config.rotary_dim) if traits.is_rope_interleaved else None
    return weight_parts(
        prefix,
        traits.names.qkv,
        [count * dim for count in (config.num_heads, config.num_kv_heads, config.num_kv_heads)],
        [head_rows(own, dim) for own in (heads.query, heads.kv, heads.kv)],
        has_bias=config.has_qkv_bias,
        orders=(order, order, None),
    )


def _mixture(
    config: ModelConfig, reader: CheckpointReader, prefix: str, group: TensorParallelGroup
) -> SparseMLP:
    experts = config.experts
    assert experts is not None

    def expert(name: str, size: int, sharing: TensorParallelGroup) -> MLP:
        return MLP(config, reader, name, sharing, expert_size=size)

    router = config.traits.names.router
    return SparseMLP(experts, config.hidden_size, reader, prefix, router, group, expert)


class DecoderLayer(nn.Module):
    """Attention and MLP, each with a residual connection, and norms by the family's traits."""

    def __init__(
        self,
        config: ModelConfig,
        reader: CheckpointReader,
        prefix: str,
        heads: HeadShard,
        group: TensorParallelGroup,
        *,
        has_experts: bool = False,
    ) -> None:
        super().__init__()
        traits, names = config.traits, config.traits.names

        def norm(name: str, *, exists: bool) -> nn.Module:
            size, eps = config.hidden_size, config.rms_norm_eps
            if not exists:
                return nn.Identity()
            return read_norm(reader, f"{prefix}.{name}", size, eps, traits)

        has_mlp_norm = traits.has_input_norms and not traits.is_parallel
        self.traits = traits
        self.input_norm = norm("input_layernorm", exists=traits.has_input_norms)
        kind = Attention if config.latent is None else LatentAttention
        self.attention = kind(config, reader, f"{prefix}.self_attn", heads, group)
        self.attention_output_norm = norm(
            names.attention_output_norm, exists=traits.has_output_norms
        )
        self.mlp_norm = norm(names.mlp_norm, exists=has_mlp_norm)
        mlp = f"{prefix}.{names.mlp}"
        self.mlp: nn.Module = (
            _mixture(config, reader, mlp, group) if has_experts else MLP(config, reader, mlp, group)
        )
        self.mlp_output_norm = norm(names.mlp_output_norm, exists=traits.has_output_norms)
        self._fused_norm: RMSNorm | None = None
        if isinstance(self.mlp_norm, RMSNorm) and not traits.changes_outputs:
            self._fused_norm = self.mlp_norm if self.mlp_norm.is_fused else None
        if self._fused_norm is not None and isinstance(self.mlp, MLP):
            self.mlp.overwrite_residual()  # which the fused norm has made, and nothing else reads

    def forward(
        self,
        x: Tensor,  # [T, hidden_size]
        rotation: Rotation | None,
        kv_cache: Tensor,
        attention: PagedAttention,
        plan: AttentionPlan,
    ) -> Tensor:
        """Return [T, hidden_size]."""
        context, normed = (rotation, kv_cache, attention, plan), self.input_norm(x)
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

    def _join(self, residual: Tensor, x: Tensor) -> Tensor:
        return torch.add(residual, x, alpha=self.traits.residual_scale)


def _sharing_one_key(heads: HeadShard) -> HeadShard:
    """Return the query heads of a rank as those of the only KV head."""
    count = len(heads.query)
    return HeadShard(range(count), range(1), count)


class CausalDecoder(nn.Module):
    """One rank of the decoder. All calls that compute are collective."""

    _adapters: TorchAdapters | None = None

    def __init__(
        self,
        config: ModelConfig,
        reader: CheckpointReader,
        group: TensorParallelGroup,
        max_model_len: int,
        block_size: int,
        output_tokens: Sequence[int] | None = None,
    ) -> None:
        """Read this rank's weights.

        output_tokens: those that have logits, ascending; the others have -inf. None for all.

        Raises UnsupportedModelError for a checkpoint that does not match the configuration, and
        InvalidValueError for a `max_model_len` above `max_position_embeddings`.
        """
        super().__init__()
        require_range("max_model_len", max_model_len, 1, config.max_position_embeddings)
        self.config = config
        self.dtype = reader.dtype
        self.device = reader.device
        self.windows = config.sliding_windows
        self.heads = config.head_shards(group.size)[group.rank]
        self.head_dim = config.head_dim
        self.vocab_slice = group.share_of(config.vocab_size)
        vocab_shape = (config.vocab_size, config.hidden_size)
        embed_name = "model.embed_tokens.weight"
        head_name = embed_name if config.tie_word_embeddings else "lm_head.weight"
        traits = config.traits
        self.lm_head = VocabHead(
            reader, head_name, vocab_shape, self.vocab_slice, output_tokens, traits.logits
        )
        table = self.lm_head.table if config.tie_word_embeddings else None
        if table is None:
            dtype = reader.exact_dtype(embed_name)
            table = reader.read(embed_name, vocab_shape, rows=self.vocab_slice, dtype=dtype).clone()
        self.embed_tokens = VocabEmbedding(table, self.vocab_slice, group, reader.dtype)
        self._embedding_scale = embedding_scale(traits, reader.dtype)
        self.layers = nn.ModuleList(
            DecoderLayer(
                config,
                reader,
                f"model.layers.{index}",
                self.heads,
                group,
                has_experts=config.experts is not None and index in config.experts.layers,
            )
            for index in range(config.num_layers)
        )
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norm = read_norm(reader, "model.norm", size, eps, traits)
        self.rotaries = {
            rope: RotaryEmbedding(
                config.rotary_dim, max_model_len, rope, reader.dtype, reader.device
            )
            for rope in dict.fromkeys((config.rope, *config.ropes))
            if rope is not None
        }
        self.rotary = self.rotaries[config.rope]
        self.backend = reader.backend
        self.attention = paged_attention(
            reader.backend,
            self.heads if config.latent is None else _sharing_one_key(self.heads),
            config.head_dim,
            block_size,
            reader.device,
            scale=traits.attention_scale,
            softcap=traits.attention_softcap,
            uses_torch=traits.has_sinks or config.latent is not None,
        )

    def enable_adapters(self) -> TorchAdapters:
        """See Decoder."""
        self._adapters = TorchAdapters(self.layers, self.dtype, self.device)
        return self._adapters

    def new_kv_cache(self, num_slots: int) -> Tensor:
        """Return zeros [num_layers, num_slots, 2, this rank's KV heads, head_dim].

        Zeros, because padding reads slots that were never written.
        """
        shape = (len(self.layers), num_slots, 2, len(self.heads.kv), self.head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def forward(self, batch: ModelInput, kv_cache: Tensor) -> Tensor:
        """Write the batch's KV to `kv_cache`; return hidden states [T, hidden_size]."""
        return self.forward_with_taps(batch, kv_cache, ()).final

    @torch.inference_mode()
    def forward_with_taps(
        self, batch: ModelInput, kv_cache: Tensor, taps: Sequence[int]
    ) -> HiddenStates:
        """See Decoder."""
        plans = {
            window: self.attention.plan(batch, self.dtype, window) for window in set(self.windows)
        }
        input_ids, positions = (
            on_device(indices, self.device) for indices in (batch.input_ids, batch.positions)
        )
        with nullcontext() if self._adapters is None else self._adapters.running(batch):
            return self._run_layers(input_ids, positions, kv_cache, plans, taps)

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def fits_graphs(self) -> bool:
        """Return whether a pass of fixed shape can be a graph, in the time of its contexts.

        A mixture of experts reads on the host which experts its tokens have.
        """
        return not self.attention.copies_pages and self.config.experts is None

    @torch.inference_mode()
    def forward_on_device(self, batch: DeviceBatch, kv_cache: Tensor) -> Tensor:
        """Run a batch of fixed shape, without a value that the host has to read.

        Its tokens run without adapters. Writes its KV to `kv_cache`; returns hidden states
        [B * Q, hidden_size].
        """
        return self.tapped_on_device(batch, kv_cache, ()).final

    @torch.inference_mode()
    def tapped_on_device(
        self, batch: DeviceBatch, kv_cache: Tensor, taps: Sequence[int]
    ) -> HiddenStates:
        """Run as `forward_on_device`. taps: as in `forward_with_taps`."""
        if self._adapters is not None:
            self._adapters.begin_base_pass()
        plans = {
            window: self.attention.plan_on_device(batch, self.dtype, window)
            for window in set(self.windows)
        }
        return self._run_layers(batch.input_ids, batch.positions, kv_cache, plans, taps)

    def _run_layers(
        self,
        input_ids: Tensor,  # [T] int64
        positions: Tensor,  # [T] int64
        kv_cache: Tensor,
        plans: Mapping[int | None, AttentionPlan],  # by window
        taps: Sequence[int],
    ) -> HiddenStates:
        rotations: dict[Rope | None, Rotation | None] = {None: None}
        rotations |= {rope: each.rotation(positions) for rope, each in self.rotaries.items()}
        x = self.embed_tokens(input_ids)
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        tapped = x.new_empty(len(x), len(taps), x.shape[1])
        kinds = zip(self.layers, self.windows, self.config.ropes, strict=True)
        for index, (layer, window, rope) in enumerate(kinds):
            _copy_to_taps(x, index, taps, tapped)
            x = layer(x, rotations[rope], kv_cache[index], self.attention, plans[window])
        _copy_to_taps(x, len(self.layers), taps, tapped)
        return HiddenStates(self.norm(x), tapped)

    def move_kv(self, kv_cache: Tensor, moves: Sequence[SlotMove]) -> None:
        """See Decoder."""
        move_kv(kv_cache, moves, self.backend)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return this rank's logits [R, len(vocab_slice)]; hidden: [R, hidden_size]."""
        logits: Tensor = self.lm_head(hidden)
        return logits

    def compute_logits_and_argmax(self, hidden: Tensor) -> tuple[Tensor, RowArgmax]:
        """Return this rank's logits and their argmax; hidden: [R, hidden_size]."""
        logits = self.compute_logits(hidden)
        return logits, row_argmax(logits)


def _copy_to_taps(x: Tensor, layer: int, taps: Sequence[int], tapped: Tensor) -> None:
    """Copy the residual stream x [T, hidden_size] that enters `layer` to its taps.

    tapped: [T, len(taps), hidden_size].
    """
    for index, tap in enumerate(taps):
        if tap == layer:
            tapped[:, index] = x
