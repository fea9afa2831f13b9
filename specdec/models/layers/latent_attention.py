"""Multi-head latent attention of DeepSeek in torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdec.kernels import AttentionPlan, PagedAttention, Rotation
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config import ModelConfig
from specdec.models.layers.linear import ColumnParallelLinear, RowParallelLinear, WeightPart
from specdec.models.layers.norm import RMSNorm
from specdec.models.layers.rotary import rotary_halves
from specdec.models.weights.checkpoint import CheckpointReader
from specdec.types.sharding import HeadShard, head_rows

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
        heads: HeadShard,
        group: TensorParallelGroup,
    ) -> None:
        """Read this rank's heads, and the projections to latents, which every rank has."""
        super().__init__()
        latent, hidden = config.latent, config.hidden_size
        assert latent is not None, "the model has no latent attention"
        self._latent, self.num_heads = latent, len(heads.query)
        order = _rotary_first(latent.plain_dim, latent.rope_dim, latent.is_rope_interleaved)
        query_in, name = hidden, "q_proj"
        self.query_down: ColumnParallelLinear | None = None
        if latent.query_rank is not None:
            query_in, name = latent.query_rank, "q_b_proj"
            down = WeightPart(f"{prefix}.q_a_proj", query_in, range(query_in))
            self.query_down = ColumnParallelLinear(reader, hidden, [down])
            weight = f"{prefix}.q_a_layernorm.weight"
            self.query_norm = RMSNorm(reader, weight, query_in, _NORM_EPS)
        size, rows = latent.query_dim, head_rows(heads.query, latent.query_dim)
        part = WeightPart(f"{prefix}.{name}", config.num_heads * size, rows, order=order)
        self.query_up = ColumnParallelLinear(reader, query_in, [part])
        order = _rotary_first(latent.rank, latent.rope_dim, latent.is_rope_interleaved)
        part = WeightPart(
            f"{prefix}.kv_a_proj_with_mqa", latent.key_dim, range(latent.key_dim), order=order
        )
        self.kv_down = ColumnParallelLinear(reader, hidden, [part])
        self.kv_norm = RMSNorm(reader, f"{prefix}.kv_a_layernorm.weight", latent.rank, _NORM_EPS)
        self._read_expansion(config, reader, prefix, heads)
        self.o_proj = RowParallelLinear(
            reader,
            f"{prefix}.o_proj",
            (hidden, config.num_heads * latent.value_dim),
            head_rows(heads.query, latent.value_dim),
            group,
        )

    def _read_expansion(
        self, config: ModelConfig, reader: CheckpointReader, prefix: str, heads: HeadShard
    ) -> None:
        """Read the matrices from a latent to the keys and values of this rank's heads."""
        latent = self._latent
        size = latent.plain_dim + latent.value_dim
        whole = reader.read(
            f"{prefix}.kv_b_proj.weight",
            (config.num_heads * size, latent.rank),
            rows=head_rows(heads.query, size),
        ).view(self.num_heads, size, latent.rank)
        # [heads, plain_dim, rank] and [heads, rank, value_dim]
        self._to_keys = whole[:, : latent.plain_dim].contiguous()
        self._to_values = whole[:, latent.plain_dim :].transpose(1, 2).contiguous()

    def forward(
        self,
        x: Tensor,  # [T, hidden_size]
        residual: Tensor | None,  # [T, hidden_size]
        rotation: Rotation | None,
        kv_cache: Tensor,  # [num_slots, 2, 1, key_dim]
        attention: PagedAttention,
        plan: AttentionPlan,
    ) -> Tensor:
        """Return [T, hidden_size], plus the residual if given."""
        latent = self._latent
        query = x if self.query_down is None else self.query_norm(self.query_down(x))
        query = self.query_up(query).view(len(x), self.num_heads, latent.query_dim)
        rotated, plain = query.split((latent.rope_dim, latent.plain_dim), dim=-1)
        absorbed = torch.bmm(plain.transpose(0, 1), self._to_keys).transpose(0, 1)
        key_rotated, compressed = self.kv_down(x).split((latent.rope_dim, latent.rank), dim=-1)
        compressed = self.kv_norm(compressed)
        key = torch.cat((key_rotated, compressed), -1)
        value = torch.cat((torch.zeros_like(key_rotated), compressed), -1)
        heads = torch.cat(
            (torch.cat((rotated, absorbed), -1), key.unsqueeze(1), value.unsqueeze(1)), 1
        )
        attended = attention.rotate_and_run(heads, None, rotation, kv_cache, plan)
        latents = attended[..., latent.rope_dim :].transpose(0, 1)  # [heads, T, rank]
        values = torch.bmm(latents, self._to_values).transpose(0, 1)
        output: Tensor = self.o_proj(values.flatten(1), residual)
        return output


def _rotary_first(plain: int, rotary: int, is_interleaved: bool) -> tuple[int, ...]:
    """Return the order of rows that puts the rotated ones, stored last, before the others."""
    halves = rotary_halves(rotary, rotary) if is_interleaved else range(rotary)
    return (*(plain + place for place in halves), *range(plain))
