"""How attention heads are divided among tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.errors import InvalidValueError
from specdec.parallel import partition


@dataclass(frozen=True)
class HeadShard:
    """The query heads of one rank, and the KV heads that they read."""

    query: range
    kv: range

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, rank: int, size: int) -> HeadShard:
        """Whole KV groups while there are as many as ranks; beyond that, ranks replicate a KV head.

        Neither number has to divide by `size`. Raises InvalidValueError when a rank would be left
        without a query head.
        """
        if size > num_heads:
            limit = f"at most {num_heads}, the number of query heads"
            raise InvalidValueError("tensor_parallel_size", size, limit)
        heads_per_kv = num_heads // num_kv_heads
        if size <= num_kv_heads:
            kv = partition(num_kv_heads, size)[rank]
            return cls(range(kv.start * heads_per_kv, kv.stop * heads_per_kv), kv)
        rank_sets = partition(size, num_kv_heads)
        kv_head = next(head for head, ranks in enumerate(rank_sets) if rank in ranks)
        sharers = rank_sets[kv_head]
        own = partition(heads_per_kv, len(sharers))[rank - sharers.start]
        first = kv_head * heads_per_kv
        return cls(range(first + own.start, first + own.stop), range(kv_head, kv_head + 1))


def head_rows(heads: range, head_dim: int) -> range:
    """The rows of a projection's weight that belong to `heads`."""
    return range(heads.start * head_dim, heads.stop * head_dim)
