import pytest

from specdec.errors import InvalidValueError
from specdec.layers import HeadShard


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (8, 8), (8, 1), (12, 4), (15, 5)])
def test_every_query_head_is_held_once_with_its_kv_head(num_heads: int, num_kv_heads: int) -> None:
    for size in range(1, num_heads + 1):
        shards = [HeadShard.of(num_heads, num_kv_heads, rank, size) for rank in range(size)]
        assert [head for shard in shards for head in shard.query] == list(range(num_heads))
        for shard in shards:
            needed = {head // (num_heads // num_kv_heads) for head in shard.query}
            assert needed == set(shard.kv)
            assert len(shard.query) % len(shard.kv) == 0


def test_uneven_split_of_smollm2() -> None:
    assert [len(HeadShard.of(9, 3, rank, 2).query) for rank in range(2)] == [3, 6]


def test_more_ranks_than_heads_is_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"tensor_parallel_size is 10; .* at most 9"):
        HeadShard.of(9, 3, 0, 10)
