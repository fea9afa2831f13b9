from hypothesis import given
from hypothesis import strategies as st

from specdec.speculation.proposers.lookahead import NgramPool

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def pool_of(text: list[int], ngram_size: int, max_ngrams: int = 10_000) -> NgramPool:
    pool = NgramPool(ngram_size, max_ngrams)
    for position, token in enumerate(text):
        pool.add(text[:position], token)
    return pool


def scanned(text: list[int], context: list[int], ngram_size: int) -> int | None:
    """Scan as the slow reference: return what last followed the longest suffix of `context`."""
    for size in range(min(ngram_size - 1, len(context)), 0, -1):
        for position in range(len(text) - 1, size - 1, -1):
            if text[position - size : position] == context[-size:]:
                return text[position]
    return None


@given(TOKENS, TOKENS, st.integers(2, 5), st.integers(0, 6))
def test_a_draft_follows_the_longest_matching_ngram(
    text: list[int], context: list[int], ngram_size: int, count: int
) -> None:
    drafted = list(pool_of(text, ngram_size).draft(context, count))
    expected: list[int] = []
    while len(expected) < count:
        token = scanned(text, context + expected, ngram_size)
        if token is None:
            break
        expected.append(token)
    assert drafted == expected


def test_the_oldest_ngrams_are_evicted_first() -> None:
    pool = pool_of(
        list(range(20)), 3, max_ngrams=6
    )  # two n-grams per token: the last three tokens fit
    assert len(pool) == 6
    assert pool.draft([17], 9) == (18, 19)
    assert pool.draft([15], 9) == ()
    pool.add([16], 40)
    pool.add([50], 60)
    assert pool.draft([16], 1) == (40,)


def test_a_repeated_ngram_counts_as_new_for_eviction() -> None:
    pool = NgramPool(2, 2)
    for context, token in ([1], 2), ([3], 4), ([1], 2), ([5], 6):
        pool.add(context, token)
    assert pool.draft([1], 1) == (2,)
    assert pool.draft([3], 1) == ()
