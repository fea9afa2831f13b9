"""Memory of the weights that ranks hold beside those of one whole model."""

from __future__ import annotations

from specdec.config.engine import DTYPE_BYTES, DTypeName
from specdec.config.quantization import QuantizationMethod
from specdec.models.config.attention.latent import Latent
from specdec.models.config.model_config import ModelConfig
from specdec.models.config.recurrent import Recurrent


def copied_bytes(
    config: ModelConfig,
    dtype: DTypeName,
    tensor_parallel_size: int,
    quantization: QuantizationMethod | None = None,
) -> int:
    """Return the memory of weights that several ranks have, without the first of each.

    These are projections to shared KV heads and to latents, indexers and routers. Where
    transformers' code runs the model, they are the embedding, which a tied head then has beside its
    own part.
    """
    num_more, element_bytes = tensor_parallel_size - 1, DTYPE_BYTES[dtype]
    if config.transformers is not None:
        num_tables = num_more + (num_more > 0 and config.tie_word_embeddings)
        return num_tables * config.vocab_size * config.hidden_size * element_bytes
    routers = 0
    if config.experts is not None:
        routers = len(config.experts.layers) * config.experts.count * config.hidden_size
    if config.varied is not None:
        sizes = config.hidden_size, config.num_heads, tensor_parallel_size
        return (config.varied.num_copied(*sizes) + num_more * routers) * element_bytes
    of_ranks = sum(
        config.num_attention_weights(len(shard.query), len(shard.kv))
        for shard in config.head_shards(tensor_parallel_size)
    )
    of_one = config.num_attention_weights(config.num_heads, config.num_kv_heads)
    matrix_bytes = element_bytes if quantization is None else 1
    copies = config.num_attention_layers * (of_ranks - of_one) * matrix_bytes
    if config.recurrent is not None:
        size, hidden = tensor_parallel_size, config.hidden_size
        ranks = (config.recurrent.num_rank_weights(hidden, rank, size) for rank in range(size))
        copies += (sum(ranks) - config.recurrent.num_matrix_weights(hidden)) * matrix_bytes
    if config.experts is not None:
        latents = len(config.experts.layers) * config.experts.num_latent_weights(config.hidden_size)
        copies += num_more * latents * matrix_bytes
    indexers = 0 if config.latent is None else config.latent.num_indexer_weights(config.hidden_size)
    return copies + num_more * (routers + indexers) * element_bytes


def adapter_bytes(
    config: ModelConfig, rank: int, dtype: DTypeName, tensor_parallel_size: int = 1
) -> int:
    """Return the memory of an adapter of all linear layers, on all ranks together.

    Layers that divide their outputs have A on every rank, the others B. An upper bound, as in
    `ModelConfig.weight_bytes`.
    """
    hidden, size = config.hidden_size, tensor_parallel_size
    of_mlp = 3 * (hidden * size + config.intermediate_size)
    latent = config.latent
    if latent is None:
        heads = config.num_attention_weights(config.num_heads, config.num_kv_heads) // hidden
        of_attention = (4 + config.traits.has_attention_gate) * hidden * size + heads
    else:
        of_attention = _latent_adapter_values(latent, hidden, config.num_heads, size)
    values = config.num_attention_layers * of_attention + config.num_mlps * of_mlp
    if config.recurrent is not None:
        values += _recurrent_adapter_values(config.recurrent, hidden, size)
    return rank * values * DTYPE_BYTES[dtype]


def _recurrent_adapter_values(recurrent: Recurrent, hidden: int, num_ranks: int) -> int:
    """Return the numbers of an adapter of rank 1 of all recurrent layers, on all ranks.

    Projections of hidden states, and to them, have those of the hidden size on each rank; of the
    others each rank is counted with both sides.
    """
    kind, total = recurrent.kind, 0
    for rank in range(num_ranks):
        num_units = len(recurrent.units(rank, num_ranks))
        total += kind.num_matrix_weights(1, num_units) - kind.num_matrix_weights(0, num_units)
    for name, shape in kind.tensors(hidden):
        if name.endswith(".weight") and len(shape) == 2:
            total += num_ranks * (hidden if hidden in shape else sum(shape))
    return len(recurrent.layers) * total


def _latent_adapter_values(latent: Latent, hidden: int, num_heads: int, num_ranks: int) -> int:
    """Return the numbers of an adapter of rank 1 of one layer's latent attention, on all ranks.

    GPUs store A of the expansion for each head, in both halves.
    """
    queries = num_heads * latent.query_dim
    query_rank = latent.query_rank
    of_query = hidden * num_ranks + queries
    if query_rank is not None:
        of_query = (hidden + 2 * query_rank) * num_ranks + queries
    of_keys = (hidden + latent.key_dim) * num_ranks
    of_expansion = num_heads * (2 * latent.rank + latent.plain_dim + latent.value_dim)
    return of_query + of_keys + of_expansion + num_heads * latent.value_dim + hidden * num_ranks
