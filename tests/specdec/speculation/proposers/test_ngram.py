from hypothesis import given
from hypothesis import strategies as st

from specdec.config.methods import NgramConfig
from specdec.speculation.proposers.base import IngestBudget
from specdec.speculation.proposers.ngram import (
    _MAX_NEW_ENTRIES,
    NgramIndex,
    NgramProposer,
    copy_from,
)
from tests.specdec.speculation.proposers.sequences import drafts, sequence

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def scanned_follower(tokens: list[int], min_n: int, max_n: int) -> int | None:
    """Scan as the slow reference: longest n-gram first, then its latest earlier occurrence."""
    for size in range(max_n, min_n - 1, -1):
        for position in range(len(tokens) - 1, size - 1, -1):
            if tokens[position - size : position] == tokens[-size:]:
                return position
    return None


@given(TOKENS, st.integers(1, 3), st.integers(0, 3), st.integers(0, 40))
def test_index_finds_what_a_scan_finds(
    tokens: list[int], min_n: int, extra: int, split: int
) -> None:
    index = NgramIndex(min_n, min_n + extra)
    assert index.update(tokens[:split], IngestBudget(100))
    assert index.update(tokens, IngestBudget(100))
    assert index.follower(tokens) == scanned_follower(tokens, min_n, min_n + extra)


def test_copy_continues_with_its_own_tokens() -> None:
    assert copy_from([9, 1, 2, 3], 1, 7) == (1, 2, 3, 1, 2, 3, 1)
    assert copy_from([5, 6, 7], 2, 3) == (7, 7, 7)
    assert copy_from([5, 6, 7, 8], 0, 2) == (5, 6)


def test_a_long_prompt_is_indexed_in_parts_without_delaying_others() -> None:
    made, short = NgramProposer(NgramConfig(2, 5)), sequence(1, [1, 2, 3, 4, 1, 2])
    prompt = [(7 * i) % 9973 + 20 for i in range(2 * _MAX_NEW_ENTRIES // 4)]
    long = sequence(2, [*prompt, 1, 2, 3, 4, 1, 2])
    assert drafts(made, long, short, count=2) == [(), (3, 4)]
    assert drafts(made, long, short, count=2) == [(), (3, 4)]
    assert drafts(made, long, short, count=2) == [(3, 4), (3, 4)]
