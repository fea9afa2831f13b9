"""The indexer of latent attention, which chooses the tokens that queries attend to."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.kernels import AttentionPlan, PagedAttention, Rotation
from specdec.kernels.reference.indexed_attention import Index, IndexedAttention
from specdec.models.config.attention.latent import INDEXER, Latent
from specdec.models.layers.linear import in_order
from specdec.models.layers.norm import LayerNorm
from specdec.models.layers.rotary import rotary_halves
from specdec.models.weights.checkpoint import CheckpointReader

_NORM_EPS = 1e-6


class TokenIndexer(nn.Module):
    """The lightning indexer of DeepSeek-V3.2 (arXiv 2512.02556, section 2.1).

    Every rank has all of it, and chooses the same tokens. It is not quantized: a small error of its
    scores would choose another token.
    """

    def __init__(
        self, latent: Latent, reader: CheckpointReader, prefix: str, hidden_size: int
    ) -> None:
        """Read the weights. prefix: of the tensors of attention."""
        super().__init__()
        indexer, query_rank = latent.indexer, latent.query_rank
        assert indexer is not None, "queries attend to all tokens"
        assert query_rank is not None, "an indexer reads the latents of queries"
        self._num_heads, dim = indexer.num_heads, indexer.head_dim
        self._scale = dim**-0.5 * indexer.num_heads**-0.5
        order = rotary_halves(dim, latent.rope_dim) if indexer.is_rope_interleaved else None

        def read(name: str, *shape: int) -> Tensor:
            return in_order(reader.read(f"{prefix}.{INDEXER}.{name}", shape), order)

        self._query = read("wq_b.weight", indexer.num_heads * dim, query_rank)
        self._key = read("wk.weight", dim, hidden_size)
        norm = read("k_norm.weight", dim), read("k_norm.bias", dim)
        self._key_norm = LayerNorm(*norm, _NORM_EPS)
        shape = (indexer.num_heads, hidden_size)
        name = f"{prefix}.{INDEXER}.weights_proj.weight"
        self._weights = reader.read(name, shape, dtype=torch.float32)

    def choose(
        self,
        x: Tensor,  # [T, hidden_size]
        latents: Tensor,  # [T, query_rank], of queries
        rotation: Rotation | None,
        kv_cache: Tensor,
        attention: PagedAttention,
        plan: AttentionPlan,
    ) -> None:
        """Choose the tokens to which `attention` attends for queries of x."""
        assert isinstance(attention, IndexedAttention), "the decoder chooses no tokens"
        assert rotation is not None, "keys of indexers are rotated"
        query = F.linear(latents, self._query).unflatten(1, (self._num_heads, -1))
        key = self._key_norm(F.linear(x, self._key))
        rotation.apply_(query)
        rotation.apply_(key[:, None])
        weights = F.linear(x.float(), self._weights) * self._scale
        attention.choose(Index(query.float(), weights, key), kv_cache, plan)
