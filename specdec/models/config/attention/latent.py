"""Sizes of multi-head latent attention, and of the indexer that it may have."""

from __future__ import annotations

from dataclasses import dataclass, replace

INDEXER = "indexer"
"""Prefix of an indexer's tensors in those of attention."""


@dataclass(frozen=True)
class Indexer:
    """Choice of the tokens that a query attends to (DeepSeek-V3.2, arXiv 2512.02556, section 2.1).

    num_chosen: tokens that a query attends to. num_heads, head_dim: of the scores that decide; the
    heads share one key a token. layers: those that choose; the others have the choice of the last
    one before them.
    """

    num_chosen: int
    num_heads: int
    head_dim: int
    is_rope_interleaved: bool
    layers: frozenset[int]

    def num_weights(self, hidden_size: int, query_rank: int) -> int:
        """Return the weights of a layer that chooses."""
        inputs = hidden_size * (self.head_dim + self.num_heads) + 2 * self.head_dim
        return inputs + query_rank * self.num_heads * self.head_dim


@dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    rank: of the latent of keys and values. query_rank: of that of queries; None without one.
    plain_dim, rope_dim: of the parts of a query, of which the second is rotated. value_dim: of a
    head. indexer: None where queries attend to all tokens before them.
    """

    rank: int
    query_rank: int | None
    plain_dim: int
    rope_dim: int
    value_dim: int
    is_rope_interleaved: bool
    indexer: Indexer | None = None

    @property
    def query_dim(self) -> int:
        """Width of a query as the checkpoint has it."""
        return self.plain_dim + self.rope_dim

    @property
    def key_dim(self) -> int:
        """Width of the key that all heads share."""
        return self.rope_dim + self.rank

    @property
    def cached_dim(self) -> int:
        """Numbers of a token in a layer's KV cache: key and value in one, and the indexer's key."""
        return self.key_dim + (0 if self.indexer is None else self.indexer.head_dim)

    def in_context(self, max_model_len: int) -> Latent:
        """Return the sizes without an indexer where it would choose all tokens of a context."""
        is_short = self.indexer is not None and max_model_len <= self.indexer.num_chosen
        return replace(self, indexer=None) if is_short else self

    def num_projection_weights(self, hidden_size: int, num_heads: int) -> int:
        """Return the weights of a layer's linear layers with `num_heads` heads."""
        queries = num_heads * self.query_dim
        query = hidden_size * queries
        if self.query_rank is not None:
            query = self.query_rank * (hidden_size + queries)
        return query + hidden_size * (self.key_dim + num_heads * self.value_dim)

    def num_expansion_weights(self, num_heads: int) -> int:
        """Return the weights from a latent to keys and values, which are never quantized."""
        return num_heads * (self.plain_dim + self.value_dim) * self.rank

    def num_exact_weights(self, hidden_size: int, num_heads: int, num_layers: int) -> int:
        """Return the weights of all layers that are never quantized."""
        norms = self.rank + (self.query_rank or 0)
        of_layers = num_layers * (norms + self.num_expansion_weights(num_heads))
        return of_layers + self.num_indexer_weights(hidden_size)

    def num_indexer_weights(self, hidden_size: int) -> int:
        """Return the weights of the indexers of all layers, which every rank has."""
        if self.indexer is None:
            return 0
        assert self.query_rank is not None, "an indexer reads the latents of queries"
        return len(self.indexer.layers) * self.indexer.num_weights(hidden_size, self.query_rank)
