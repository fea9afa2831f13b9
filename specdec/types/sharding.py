"""How attention heads are divided among tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from specdec.types.errors import InvalidValueError


def partition(total: int, parts: int) -> tuple[range, ...]:
    """Divides range(total) into `parts` contiguous ranges whose lengths differ by at most one."""
    bounds = [part * total // parts for part in range(parts + 1)]
    return tuple(range(start, end) for start, end in pairwise(bounds))


@dataclass(frozen=True)
class HeadShard:
    """The query heads of one rank, and the KV heads that they read.

    heads_per_kv: query heads of the model that share a KV head. Of the first and of the last KV
    head here, other ranks may have some.
    """

    query: range
    kv: range
    heads_per_kv: int

    @classmethod
    def all_ranks(cls, num_heads: int, num_kv_heads: int, size: int) -> tuple[HeadShard, ...]:
        """Whole KV groups while there are as many as ranks; beyond that, ranks replicate a KV head.

        Neither number has to divide by `size`. Where groups fall unevenly, query heads are divided
        evenly instead, and a group that falls to two ranks has its KV head on both: if that spares
        the rank with most to do some of it, and costs none with most KV heads another one. Raises
        InvalidValueError when a rank would be left without a query head.
        """
        if size > num_heads:
            limit = f"at most {num_heads}, the number of query heads"
            raise InvalidValueError("tensor_parallel_size", size, limit)
        heads_per_kv = num_heads // num_kv_heads
        by_groups = cls._holding(_divide_groups(num_kv_heads, heads_per_kv, size), heads_per_kv)
        by_heads = cls._holding(partition(num_heads, size), heads_per_kv)
        is_worth_it = _most_work(by_heads) < _most_work(by_groups)
        takes_more = _most_kv_heads(by_heads) > _most_kv_heads(by_groups)
        return by_heads if is_worth_it and not takes_more else by_groups

    @classmethod
    def _holding(cls, queries: Sequence[range], heads_per_kv: int) -> tuple[HeadShard, ...]:
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
        """The place of the first query head among those of its KV head."""
        return self.query.start - self.kv.start * self.heads_per_kv


def _divide_groups(num_kv_heads: int, heads_per_kv: int, size: int) -> list[range]:
    """The query heads of each rank, so that none has parts of two groups."""
    if size <= num_kv_heads:
        return [
            range(kv.start * heads_per_kv, kv.stop * heads_per_kv)
            for kv in partition(num_kv_heads, size)
        ]
    return [
        range(kv_head * heads_per_kv + own.start, kv_head * heads_per_kv + own.stop)
        for kv_head, sharers in enumerate(partition(size, num_kv_heads))
        for own in partition(heads_per_kv, len(sharers))
    ]


def _most_work(shards: Sequence[HeadShard]) -> int:
    """Of any rank, in heads that it projects: queries and outputs, keys and values."""
    return max(2 * len(shard.query) + 2 * len(shard.kv) for shard in shards)


def _most_kv_heads(shards: Sequence[HeadShard]) -> int:
    return max(len(shard.kv) for shard in shards)


def head_rows(heads: range, head_dim: int) -> range:
    """The rows of a projection's weight that belong to `heads`."""
    return range(heads.start * head_dim, heads.stop * head_dim)
