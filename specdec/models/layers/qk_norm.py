"""Norms of the query and key heads of one rank, by the scope that a family has."""

from __future__ import annotations

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.config.traits import NormKind, QkNorm
from specdec.models.layers.norm import AllHeadsNorm, LayerNorm, RMSNorm, read_norm
from specdec.models.layers.rotary import rotary_halves
from specdec.models.weights.checkpoint import CheckpointReader
from specdec.types.sharding import HeadShard

HeadNorm = RMSNorm | LayerNorm | AllHeadsNorm
"""A norm of heads [T, heads, head_dim]."""


def read_qk_norms(
    config: ModelConfig, reader: CheckpointReader, prefix: str, group: TensorParallelGroup
) -> tuple[HeadNorm, HeadNorm]:
    """Read the norms of this rank's query and key heads. prefix: of attention's tensors."""
    shards = config.head_shards(group.size)
    own = shards[group.rank]
    query, key = (f"{prefix}.{name}" for name in config.traits.names.qk_norms)
    eps, dim = config.rms_norm_eps, config.head_dim
    match config.traits.qk_norm:
        case QkNorm.HEAD:
            traits = config.traits
            order = rotary_halves(dim, config.rotary_dim) if traits.is_rope_interleaved else None
            return (
                read_norm(reader, query, dim, eps, traits, order),
                read_norm(reader, key, dim, eps, traits, order),
            )
        case QkNorm.ROTATED_HEAD:
            norm = RMSNorm(reader, None, dim, eps)
            return norm, norm
        case QkNorm.EACH_HEAD:
            return (
                _each_head(config, reader, query, config.num_heads, own.query),
                _each_head(config, reader, key, config.num_kv_heads, own.kv),
            )
        case QkNorm.ALL_HEADS:
            counted = counted_kv_heads(shards, group.rank)
            shapes = (config.num_heads, dim), (config.num_kv_heads, dim)
            return (
                AllHeadsNorm(
                    reader, f"{query}.weight", shapes[0], own.query, own.query, eps, group
                ),
                AllHeadsNorm(reader, f"{key}.weight", shapes[1], own.kv, counted, eps, group),
            )


def counted_kv_heads(shards: tuple[HeadShard, ...], rank: int) -> range:
    """Return the KV heads of a rank that no rank before it has."""
    first = max([shards[rank].kv.start, *(shard.kv.stop for shard in shards[:rank])])
    return range(first, max(first, shards[rank].kv.stop))


def _each_head(
    config: ModelConfig, reader: CheckpointReader, name: str, num_heads: int, own: range
) -> LayerNorm:
    """Read the norm of heads that have weights of their own, [heads, head_dim]."""
    assert config.traits.norm is NormKind.LAYER, "RMSNorm has one vector of weights"
    weight = reader.read(f"{name}.weight", (num_heads, config.head_dim), rows=own)
    if config.traits.is_rope_interleaved:
        weight = weight[:, list(rotary_halves(config.head_dim, config.rotary_dim))]
    return LayerNorm(weight.clone(), None, config.rms_norm_eps)
