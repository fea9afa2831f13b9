"""Sharding of attention heads over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from specdec.types.errors import InvalidValueError


def partition(total: int, parts: int) -> tuple[range, ...]:
    """Divide range(total) into `parts` contiguous ranges whose lengths differ by at most one."""
    bounds = [part * total // parts for part in range(parts + 1)]
    return tuple(range(start, end) for start, end in pairwise(bounds))


@dataclass(frozen=True)
class HeadShard:
    """The query heads of one rank, and the KV heads that they read.

    heads_per_kv: query heads per KV head in the model. Other ranks may hold some query heads of
    this rank's first and last KV head.
    """

    query: range
    kv: range
    heads_per_kv: int

    @classmethod
    def all_ranks(cls, num_heads: int, num_kv_heads: int, size: int) -> tuple[HeadShard, ...]:
        """Return the shard of each rank.

        Ranks hold whole KV groups; with more ranks than KV heads, KV heads are replicated. Neither
        number needs to be divisible by `size`. Query heads are instead divided evenly, and the KV
        heads of divided groups replicated, if that reduces the maximum work of a rank and does not
        increase the maximum number of KV heads. Raises InvalidValueError if a rank would have no
        query head.
        """
        if size > num_heads:
            limit = f"at most {num_heads}, the number of query heads"
            raise InvalidValueError("tensor_parallel_size", size, limit)
        heads_per_kv = num_heads // num_kv_heads
        by_groups = cls._holding(_divide_groups(num_kv_heads, heads_per_kv, size), heads_per_kv)
        by_heads = cls._holding(partition(num_heads, size), heads_per_kv)
        reduces_work = _max_work(by_heads) < _max_work(by_groups)
        needs_more_kv = _max_kv_heads(by_heads) > _max_kv_heads(by_groups)
        return by_heads if reduces_work and not needs_more_kv else by_groups

    @classmethod
    def _holding(cls, queries: Sequence[range], heads_per_kv: int) -> tuple[HeadShard, ...]:
        """Return shards with these query heads and the KV heads that they read."""
        return tuple(
            cls(
                query,
                range(query.start // heads_per_kv, (query.stop - 1) // heads_per_kv + 1),
                heads_per_kv,
            )
            for query in queries
        )

    @property
    def first_in_group(self) -> int:
        """Return the index of the first query head within its KV group."""
        return self.query.start - self.kv.start * self.heads_per_kv

    def sharing_one_key(self) -> HeadShard:
        """Return the query heads, numbered from 0, as those of the only KV head."""
        count = len(self.query)
        return HeadShard(range(count), range(1), count)


def _divide_groups(num_kv_heads: int, heads_per_kv: int, size: int) -> list[range]:
    """Return the query heads of each rank, such that no rank has parts of two KV groups."""
    if size <= num_kv_heads:
        return [
            range(kv.start * heads_per_kv, kv.stop * heads_per_kv)
            for kv in partition(num_kv_heads, size)
        ]
    return [
        range(kv_head * heads_per_kv + own.start, kv_head * heads_per_kv + own.stop)
        for kv_head, ranks in enumerate(partition(size, num_kv_heads))
        for own in partition(heads_per_kv, len(ranks))
    ]


def _max_work(shards: Sequence[HeadShard]) -> int:
    """Return the maximum work of a rank, in projected heads: query and output, key and value."""
    return max(2 * len(shard.query) + 2 * len(shard.kv) for shard in shards)


def _max_kv_heads(shards: Sequence[HeadShard]) -> int:
    return max(len(shard.kv) for shard in shards)


def head_rows(heads: range, head_dim: int) -> range:
    """Return the rows of a projection's weight that belong to `heads`."""
    return range(heads.start * head_dim, heads.stop * head_dim)
