from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.config.speculation.methods import NgramConfig
from specdec.speculation.proposers import DraftRequest
from specdec.speculation.proposers.base import IngestBudget
from specdec.speculation.proposers.ngram import (
    _MAX_DRAFTS_AHEAD,
    _MAX_NEW_ENTRIES,
    _MAX_OCCURRENCES,
    NgramIndex,
    NgramProposer,
    copy_after,
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


def drafts_ahead(proposer, *seqs, count=7):
    """Return the drafts of each sequence by the token before them; None where not known."""
    proposals = proposer.propose_ahead([DraftRequest(seq, count) for seq in seqs])
    if proposals is None:
        return None
    assert [each.seq_id for each in proposals] == [seq.seq_id for seq in seqs]
    return [{token: tuple(draft) for token, *draft in each.drafts_by_token} for each in proposals]


@settings(max_examples=400)
@given(TOKENS.filter(bool), st.integers(1, 3), st.integers(0, 3), st.integers(1, 6), st.integers())
def test_drafts_ahead_are_those_after_each_next_token(
    tokens: list[int], min_n: int, extra: int, count: int, split: int
) -> None:
    """For every token, those that never occurred included; also after drafts of the usual kind."""
    config = NgramConfig(min_n, min_n + extra)
    made, seq = NgramProposer(config), sequence(1, tokens[: split % len(tokens) + 1])
    drafts(made, seq, count=count)
    seq.token_ids[:] = tokens
    [ahead] = drafts_ahead(made, seq, count=count)
    for token in range(5):
        followed = sequence(1, [*tokens, token])
        [expected] = drafts(NgramProposer(config), followed, count=count)
        assert ahead.get(token, ()) == expected
        assert drafts(made, followed, count=count) == [expected], "the index went on"
        made.release(1)
        drafts_ahead(made, seq, count=count)


@given(TOKENS, st.integers(0, 3), st.integers(0, 50), st.integers(0, 7))
def test_a_copy_after_a_token_is_that_of_the_longer_text(
    tokens: list[int], token: int, start: int, count: int
) -> None:
    start %= len(tokens) + 1
    assert copy_after(tokens, token, start, count) == copy_from([*tokens, token], start, count)


def test_drafts_ahead_of_frequent_ends_are_not_known() -> None:
    made = NgramProposer(NgramConfig(2, 4))
    often = [number for i in range(_MAX_OCCURRENCES) for number in (7, 20 + i)]
    assert drafts_ahead(made, sequence(1, [*often[2:], 7])) is not None
    assert drafts_ahead(made, sequence(2, [*often, 7])) is None
    assert drafts_ahead(made, sequence(3, [1, 2, 3]), sequence(4, [*often, 7])) is None


def test_drafts_ahead_of_a_step_are_limited() -> None:
    text = [number for i in range(_MAX_OCCURRENCES - 1) for number in (7, 20 + i)]
    num_seqs = _MAX_DRAFTS_AHEAD // (_MAX_OCCURRENCES - 1)
    seqs = [sequence(i, [*text, 7]) for i in range(num_seqs + 1)]
    made = NgramProposer(NgramConfig(2, 4))
    assert drafts_ahead(made, *seqs[:-1]) is not None
    assert drafts_ahead(made, *seqs) is None


def test_drafts_ahead_wait_until_a_long_prompt_is_indexed() -> None:
    made = NgramProposer(NgramConfig(2, 4))
    long = sequence(1, [(7 * i) % 9973 + 20 for i in range(_MAX_NEW_ENTRIES // 4)] + [20])
    assert drafts_ahead(made, long, count=2) is None
    assert drafts_ahead(made, long, count=2) == [{27: (34, 41)}]


def test_a_text_is_indexed_while_no_draft_is_wanted() -> None:
    made = NgramProposer(NgramConfig(2, 4))
    seq = sequence(1, [1, 2, 3, 1])
    assert drafts_ahead(made, seq, count=0) == [{}]
    assert drafts_ahead(made, seq, count=1) == [{2: (3,)}]
