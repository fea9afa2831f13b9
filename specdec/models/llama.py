"""Llama decoder (Touvron et al. 2023) with tensor parallelism.

Mistral (Jiang et al. 2023), Qwen2 and Qwen3 (Yang et al. 2024, 2025) are the same decoder with
biases, norms or windows as configured in ModelConfig.

Each rank has the heads of its KV groups, its shard of the MLP's hidden units and its shard of the
vocabulary, and reads only these from the checkpoint. Hidden states are equal on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specdec.kernels import AttentionPlan, PagedAttention, Rotation
from specdec.kernels.attention import QueryKeyNorms
from specdec.kernels.backend import KernelBackend, paged_attention
from specdec.kernels.forward_batch import HiddenStates, ModelInput, SlotMove, on_device
from specdec.kernels.rows import row_kernels
from specdec.kernels.sample import RowArgmax, row_argmax
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config import ModelConfig
from specdec.models.layers.linear import (
    ColumnParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabEmbedding,
    VocabHead,
    WeightPart,
)
from specdec.models.layers.rotary import RotaryEmbedding
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
        kv_size = config.num_kv_heads * config.head_dim
        query_rows = head_rows(heads.query, config.head_dim)
        kv_rows = head_rows(heads.kv, config.head_dim)
        parts = [
            WeightPart(f"{prefix}.q_proj", query_size, query_rows, config.has_qkv_bias),
            WeightPart(f"{prefix}.k_proj", kv_size, kv_rows, config.has_qkv_bias),
            WeightPart(f"{prefix}.v_proj", kv_size, kv_rows, config.has_qkv_bias),
        ]
        self.qkv_proj = ColumnParallelLinear(reader, input_size or config.hidden_size, parts)
        if config.has_qk_norm:
            size, eps = config.head_dim, config.rms_norm_eps
            self.query_norm = RMSNorm(reader, f"{prefix}.q_norm.weight", size, eps)
            self.key_norm = RMSNorm(reader, f"{prefix}.k_norm.weight", size, eps)
        self.o_proj = RowParallelLinear(
            reader,
            f"{prefix}.o_proj",
            (config.hidden_size, query_size),
            query_rows,
            group,
            has_bias=config.has_output_bias,
        )

    def forward(
        self,
        x: Tensor,  # [T, input_size]
        residual: Tensor | None,  # [T, hidden_size]
        rotation: Rotation,
        kv_cache: Tensor,  # [num_slots, 2, num_kv_heads, head_dim]
        attention: PagedAttention,
        plan: AttentionPlan,
    ) -> Tensor:
        """Return [T, hidden_size], including the residual if there is one."""
        heads = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        norms = QueryKeyNorms(self.query_norm, self.key_norm) if self.has_qk_norm else None
        attended = attention.rotate_and_run(heads, norms, rotation, kv_cache, plan)
        output: Tensor = self.o_proj(attended.flatten(1), residual)
        return output


class MLP(nn.Module):
    """The gated feed-forward layer, SwiGLU (Shazeer 2020)."""

    def __init__(
        self,
        config: ModelConfig,
        reader: CheckpointReader,
        prefix: str,
        group: TensorParallelGroup,
    ) -> None:
        super().__init__()
        hidden, intermediate = config.hidden_size, config.intermediate_size
        units = group.share_of(intermediate)
        has_bias = config.has_mlp_bias
        parts = [
            WeightPart(f"{prefix}.gate_proj", intermediate, units, has_bias),
            WeightPart(f"{prefix}.up_proj", intermediate, units, has_bias),
        ]
        self.gate_up_proj = ColumnParallelLinear(reader, hidden, parts)
        self._kernels = row_kernels(reader.backend)
        shape = (hidden, intermediate)
        self.down_proj = RowParallelLinear(
            reader, f"{prefix}.down_proj", shape, units, group, has_bias=has_bias
        )

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return [T, hidden_size], including the residual; x, residual: [T, hidden_size]."""
        gated = self._kernels.silu_mul(self.gate_up_proj(x))
        output: Tensor = self.down_proj(gated, residual)
        return output


class DecoderLayer(nn.Module):
    """Attention and MLP, each with a pre-norm and a residual connection."""

    def __init__(
        self,
        config: ModelConfig,
        reader: CheckpointReader,
        prefix: str,
        heads: HeadShard,
        group: TensorParallelGroup,
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(reader, f"{prefix}.input_layernorm.weight", size, eps)
        self.attention = Attention(config, reader, f"{prefix}.self_attn", heads, group)
        self.mlp_norm = RMSNorm(reader, f"{prefix}.post_attention_layernorm.weight", size, eps)
        self.mlp = MLP(config, reader, f"{prefix}.mlp", group)

    def forward(
        self,
        x: Tensor,  # [T, hidden_size]
        rotation: Rotation,
        kv_cache: Tensor,
        attention: PagedAttention,
        plan: AttentionPlan,
    ) -> Tensor:
        """Return [T, hidden_size]."""
        args = (rotation, kv_cache, attention, plan)
        if self.mlp_norm.is_fused:
            attended = self.attention(self.input_norm(x), None, *args)
            x, normed = self.mlp_norm.add(x, attended)
        else:
            x = self.attention(self.input_norm(x), x, *args)
            normed = self.mlp_norm(x)
        output: Tensor = self.mlp(normed, x)
        return output


class CausalDecoder(nn.Module):
    """One rank of the decoder. All calls that compute are collective."""

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
        self.lm_head = VocabHead(reader, head_name, vocab_shape, self.vocab_slice, output_tokens)
        table = self.lm_head.table if config.tie_word_embeddings else None
        if table is None:
            dtype = reader.exact_dtype(embed_name)
            table = reader.read(embed_name, vocab_shape, rows=self.vocab_slice, dtype=dtype).clone()
        self.embed_tokens = VocabEmbedding(table, self.vocab_slice, group, reader.dtype)
        self.layers = nn.ModuleList(
            DecoderLayer(config, reader, f"model.layers.{index}", self.heads, group)
            for index in range(config.num_layers)
        )
        self.norm = RMSNorm(reader, "model.norm.weight", config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryEmbedding(
            config.head_dim, max_model_len, config.rope, reader.dtype, reader.device
        )
        self.backend = reader.backend
        self.attention = paged_attention(
            reader.backend, self.heads, config.head_dim, block_size, reader.device
        )

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
        rotation = self.rotary.rotation(on_device(batch.positions, self.device))
        x = self.embed_tokens(on_device(batch.input_ids, self.device))
        tapped = x.new_empty(len(x), len(taps), x.shape[1])
        for index, (layer, window) in enumerate(zip(self.layers, self.windows, strict=True)):
            _copy_to_taps(x, index, taps, tapped)
            x = layer(x, rotation, kv_cache[index], self.attention, plans[window])
        _copy_to_taps(x, len(self.layers), taps, tapped)
        return HiddenStates(self.norm(x), tapped)

    def move_kv(self, kv_cache: Tensor, moves: Sequence[SlotMove]) -> None:
        """See Decoder."""
        if self.backend is KernelBackend.TRITON:
            from specdec.kernels.triton.moves import move_kv  # imports Triton

            move_kv(kv_cache, moves)
            return
        sources, targets = torch.tensor(moves, device=self.device).unbind(1)
        kv_cache.index_copy_(1, targets, kv_cache[:, sources])

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
