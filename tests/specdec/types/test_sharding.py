import pytest

from specdec.types.errors import InvalidValueError
from specdec.types.sharding import HeadShard


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (8, 8), (8, 1), (12, 4), (15, 5)])
def test_each_query_head_is_on_one_rank_with_its_kv_head(num_heads: int, num_kv_heads: int) -> None:
    for size in range(1, num_heads + 1):
        shards = HeadShard.all_ranks(num_heads, num_kv_heads, size)
        assert [head for shard in shards for head in shard.query] == list(range(num_heads))
        for shard in shards:
            needed = {head // (num_heads // num_kv_heads) for head in shard.query}
            assert needed == set(shard.kv)
            first, group = shard.query.start, num_heads // num_kv_heads
            assert first == shard.kv.start * group + shard.first_in_group


def test_uneven_kv_groups_of_smollm2_are_divided() -> None:
    shards = HeadShard.all_ranks(9, 3, 2)
    assert [len(shard.query) for shard in shards] == [4, 5]
    assert [list(shard.kv) for shard in shards] == [[0, 1], [1, 2]]


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size", "num_query_heads"),
    [
        (32, 8, 4, [8, 8, 8, 8]),  # already even
        (32, 8, 3, [8, 12, 12]),  # even division would need a fourth KV head on one rank
    ],
)
def test_other_groups_stay_whole(
    num_heads: int, num_kv_heads: int, size: int, num_query_heads: list[int]
) -> None:
    shards = HeadShard.all_ranks(num_heads, num_kv_heads, size)
    assert [len(shard.query) for shard in shards] == num_query_heads
    assert sum(len(shard.kv) for shard in shards) == num_kv_heads


def test_more_ranks_than_heads_is_rejected() -> None:
    with pytest.raises(InvalidValueError, match=r"tensor_parallel_size is 10; .* at most 9"):
        HeadShard.all_ranks(9, 3, 10)
