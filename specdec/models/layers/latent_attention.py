"""Multi-head latent attention of DeepSeek: its weights, and its computation in torch."""

from __future__ import annotations

from torch import Tensor, nn

from specdec.kernels import AttentionPlan, PagedAttention, Rotation
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.layers.indexer import TokenIndexer
from specdec.models.layers.latent_expansion import LatentExpansion
from specdec.models.layers.linear import ColumnParallelLinear, RowParallelLinear, WeightPart
from specdec.models.layers.norm import RMSNorm
from specdec.models.layers.rotary import rotary_halves
from specdec.models.weights.checkpoint import CheckpointReader
from specdec.types.sharding import head_rows

_NORM_EPS = 1e-6  # of the norms of latents, whatever config.json has for the others


class LatentAttention(nn.Module):
    """Self-attention of this rank's heads over one latent vector a token.

    DeepSeek-V2, arXiv 2405.04434, section 2.1, in the absorbed form: the matrix that expands a
    latent to the keys of a head is applied to its query instead, and the one for its values to what
    it attends to. So all heads share one key, the rotated part before the latent, of which the
    latter is the value too. Each rank has the latents of all tokens.
    """

    def __init__(
        self,
        config: ModelConfig,
        reader: CheckpointReader,
        prefix: str,
        group: TensorParallelGroup,
        *,
        has_indexer: bool = False,
    ) -> None:
        """Read this rank's heads, and the projections to latents, which every rank has."""
        super().__init__()
        latent, hidden = config.latent, config.hidden_size
        assert latent is not None, "the model has no latent attention"
        heads = config.head_shards(group.size)[group.rank]
        self._latent, self.num_heads = latent, len(heads.query)
        order = _rotary_first(latent.plain_dim, latent.rope_dim, latent.is_rope_interleaved)
        rows = head_rows(heads.query, latent.query_dim)
        num_queries, query_rank = config.num_heads * latent.query_dim, latent.query_rank
        self.query_up: ColumnParallelLinear | None = None
        if query_rank is None:
            query = WeightPart(f"{prefix}.q_proj", num_queries, rows, order=order)
        else:
            query = WeightPart(f"{prefix}.q_a_proj", query_rank, range(query_rank))
            up = WeightPart(f"{prefix}.q_b_proj", num_queries, rows, order=order)
            self.query_up = ColumnParallelLinear(reader, query_rank, [up])
            weight = f"{prefix}.q_a_layernorm.weight"
            self.query_norm = RMSNorm(reader, weight, query_rank, _NORM_EPS)
        self.indexer = TokenIndexer(latent, reader, prefix, hidden) if has_indexer else None
        order = _rotary_first(latent.rank, latent.rope_dim, latent.is_rope_interleaved)
        key = WeightPart(
            f"{prefix}.kv_a_proj_with_mqa", latent.key_dim, range(latent.key_dim), order=order
        )
        self.qkv_proj = ColumnParallelLinear(reader, hidden, [query, key])
        self.kv_norm = RMSNorm(reader, f"{prefix}.kv_a_layernorm.weight", latent.rank, _NORM_EPS)
        self.expansion = LatentExpansion(config, latent, reader, f"{prefix}.kv_b_proj", heads)
        shape = (hidden, config.num_heads * latent.value_dim)
        columns = head_rows(heads.query, latent.value_dim)
        self.o_proj = RowParallelLinear(reader, f"{prefix}.o_proj", shape, columns, group)

    def forward(
        self,
        x: Tensor,  # [T, hidden_size]
        residual: Tensor | None,  # [T, hidden_size]
        rotation: Rotation | None,
        kv_cache: Tensor,  # [num_slots, 1, 1, cached_dim]
        attention: PagedAttention,
        plan: AttentionPlan,
        query_scale: Tensor | None = None,  # [T, 1, 1]
    ) -> Tensor:
        """Return [T, hidden_size], plus the residual if given."""
        latent, expansion = self._latent, self.expansion.in_torch
        projected = self.qkv_proj(x)
        query = projected[:, : -latent.key_dim]
        if self.query_up is not None:
            latents = self.query_norm(query)
            query = self.query_up(latents)
            if self.indexer is not None:
                self.indexer.choose(x, latents, rotation, kv_cache, attention, plan)
        query = query.reshape(len(x), self.num_heads, latent.query_dim)
        key = projected[:, -latent.key_dim :]
        heads = x.new_empty(len(x), self.num_heads + 1, latent.key_dim)
        heads[:, :-1, : latent.rope_dim] = query[..., : latent.rope_dim]
        plain = query[..., latent.rope_dim :].transpose(0, 1)  # [heads, T, plain_dim]
        heads[:, :-1, latent.rope_dim :] = expansion.to_keys.multiply(plain).transpose(0, 1)
        heads[:, -1, : latent.rope_dim] = key[:, : latent.rope_dim]
        heads[:, -1, latent.rope_dim :] = self.kv_norm(key[:, latent.rope_dim :])
        if query_scale is not None:
            heads[:, :-1] *= query_scale
        attended = attention.rotate_and_run(heads, None, rotation, kv_cache, plan)
        values = expansion.to_values.multiply(attended.transpose(0, 1)).transpose(0, 1)
        output: Tensor = self.o_proj(values.flatten(1), residual)
        return output


def _rotary_first(plain: int, rotary: int, is_interleaved: bool) -> tuple[int, ...]:
    """Return the order of rows that puts the rotated ones, stored last, before the others."""
    halves = rotary_halves(rotary, rotary) if is_interleaved else range(rotary)
    return (*(plain + place for place in halves), *range(plain))
