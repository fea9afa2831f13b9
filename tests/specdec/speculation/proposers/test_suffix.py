"""Tests of suffix decoding: draft lengths, sources and the isolation of tenants."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.config.speculation.methods import SuffixConfig
from specdec.speculation.proposers import DraftRequest
from specdec.speculation.proposers.suffix import _MAX_NEW_TOKENS, SuffixProposer
from tests.specdec.speculation.proposers.sequences import drafts, end, sequence

STORY = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]


def proposer(depth=24, cached=100, factor=1.0, prob=0.1):
    return SuffixProposer(SuffixConfig(depth, cached, factor, prob))


@pytest.mark.parametrize("num_matched", [1, 2, 4])
@pytest.mark.parametrize(("factor", "most"), [(1.0, 1), (2.0, 2), (0.5, 0.5)])
def test_the_longer_the_match_the_longer_the_draft(num_matched, factor, most):
    seq = sequence(1, [*STORY, 99, *STORY[:num_matched]])
    count = min(7, int(num_matched * most))
    assert drafts(proposer(factor=factor), seq) == [tuple([*STORY, 99][num_matched:][:count])]


def test_a_match_and_its_draft_share_the_depth_of_the_tree():
    seq = sequence(1, [*STORY, 99, *STORY[:6]])
    assert drafts(proposer(depth=8), seq) == [tuple(STORY[6:10])]
    assert drafts(proposer(depth=2), seq) == [tuple(STORY[6:7])]


def test_a_draft_goes_on_while_it_is_probable_enough():
    prompt = [1, 2, 3, 50, 61, 1, 2, 3, 50, 62, 1, 2, 3, 60, 1, 2, 3, 70, 1, 2]
    assert drafts(proposer(prob=0.4, factor=4), sequence(1, prompt)) == [(3, 50)]
    assert drafts(proposer(prob=0.6, factor=4), sequence(1, prompt)) == [(3,)]


def test_nothing_is_drafted_without_a_match():
    assert drafts(proposer(), sequence(1, STORY), sequence(2, [5])) == [(), ()]


def test_a_sequence_is_followed_as_it_grows():
    made, seq = proposer(), sequence(1, STORY)
    assert drafts(made, seq) == [()]
    seq.token_ids += STORY[:3]
    assert drafts(made, seq) == [tuple(STORY[3:6])]
    seq.token_ids += STORY[3:9]
    assert drafts(made, seq) == [(14, *STORY[:6])]


def test_a_long_prompt_is_indexed_in_parts_without_delaying_others():
    made, short = proposer(), sequence(1, [*STORY, *STORY[:2]])
    long = sequence(
        2, [(7 * i) % 1999 + 20 for i in range(3 * _MAX_NEW_TOKENS)] + STORY + STORY[:2]
    )
    for _ in range(3):
        assert drafts(made, long, short) == [(), tuple(STORY[2:4])]
    assert drafts(made, long, short) == [tuple(STORY[2:4])] * 2


def test_earlier_outputs_are_drafted_from_but_not_earlier_prompts():
    made = proposer()
    earlier = sequence(1, STORY, [21, 22, 23, 24, 25, 26])
    drafts(made, earlier)
    end(made, earlier)
    assert drafts(made, sequence(2, [99, 21, 22, 23])) == [(24, 25, 26)]
    assert drafts(made, sequence(3, [99, 5, 6, 7])) == [()]


def test_the_better_match_of_both_trees_is_used():
    made = proposer()
    earlier = sequence(1, [0], [1, 2, 3, 4, 5, 6])
    drafts(made, earlier)
    end(made, earlier)
    assert drafts(made, sequence(2, [2, 3, 70, 71, 99, 1, 2, 3])) == [(4, 5, 6)]
    assert drafts(made, sequence(3, [0, 1, 2, 3, 70, 71, 72, 99, 0, 1, 2, 3])) == [(70, 71, 72, 99)]


def test_zero_earlier_outputs_turn_the_cache_off():
    made = proposer(cached=0)
    earlier = sequence(1, [0], STORY)
    drafts(made, earlier)
    end(made, earlier)
    made.take([])
    assert made.cache.num_nodes == 0
    assert drafts(made, sequence(2, [99, *STORY[:4]])) == [()]


def test_a_preempted_sequence_is_kept_once():
    made, seq = proposer(), sequence(1, [0], [])
    for token in STORY:
        seq.token_ids.append(token)
        drafts(made, seq)
        made.release(1)
    assert made.cache.num_outputs == 0
    drafts(made, seq)
    end(made, seq)
    made.release(1)
    made.take([])
    assert made.cache.num_outputs == 1


def test_a_sequence_without_draft_requests_is_not_cached():
    made = proposer()
    made.release(7)
    drafts(made, sequence(1, STORY), count=0)
    made.take([])
    assert made.cache.num_outputs == 0


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.integers(0, 3), min_size=1, max_size=15)),
        min_size=2,
        max_size=8,
    )
)
def test_requests_of_other_tenants_do_not_affect_drafts(asked):
    """A tenant gets the same drafts with and without requests of other tenants."""

    def drafted_for(tenant, others_too):
        made, all_drafts = proposer(depth=8, prob=0.0, factor=3), []
        for seq_id, (owner, output) in enumerate(asked):
            if owner != tenant and not others_too:
                continue
            seq = sequence(seq_id, [9], cache_salt=str(owner))
            for token in output:
                seq.token_ids.append(token)
                made_now = drafts(made, seq)
                all_drafts += made_now if owner == tenant else []
            end(made, seq)
        return all_drafts

    for tenant in range(3):
        assert drafted_for(tenant, others_too=True) == drafted_for(tenant, others_too=False)


def ahead(made, *seqs, pending=(), count=7):
    """Return the drafts of each sequence by the token before them."""
    requests = [DraftRequest(seq, count, pending_drafts=tuple(pending)) for seq in seqs]
    proposals = made.propose_ahead(requests)
    return [{token: tuple(draft) for token, *draft in each.drafts_by_token} for each in proposals]


@pytest.mark.parametrize("num_known", [1, 3, 5])
def test_drafts_ahead_follow_pending_drafts_and_the_likeliest_token(num_known):
    made, seq = proposer(), sequence(1, [*STORY, 99, *STORY[:num_known]])
    pending = drafts(made, seq, count=2)[0]
    [found] = ahead(made, seq, pending=pending, count=3)
    token = STORY[num_known + len(pending)]
    seq.token_ids += [*pending, token]
    assert found == {token: drafts(proposer(), seq, count=3)[0]}


def test_drafts_ahead_are_of_earlier_outputs_and_the_most_frequent_tokens():
    made = proposer()
    earlier = sequence(1, [0], [1, 2, 30, 31, 32, 1, 2, 40, 41, 42, 1, 2, 30, 31, 33])
    drafts(made, earlier)
    end(made, earlier)
    seq = sequence(2, [99, 1])
    drafts(made, seq)
    [found] = ahead(made, seq, pending=[2])
    assert list(found) == [30, 40]
    assert found[40] == (41, 42, 1)


def test_lookups_ahead_are_limited_and_trees_are_not_drafted_ahead():
    made = proposer()
    text = [token for last in range(6) for token in (1, 2, 20 + last, 20 + last, 7)] + [1, 2]
    assert [len(each) for each in ahead(made, sequence(1, text))] == [4]
    many = [sequence(number, text) for number in range(2, 34)]
    assert [len(each) for each in ahead(made, *many)] == [1] * 32
    assert made.propose_ahead([DraftRequest(many[0], 3, max_nodes=6)]) is None


def test_a_text_that_is_ingested_in_parts_has_no_drafts_ahead_before():
    made = proposer()
    long = sequence(
        1, [(7 * i) % 1999 + 20 for i in range(2 * _MAX_NEW_TOKENS)] + STORY + STORY[:2]
    )
    assert [ahead(made, long) for _ in range(3)] == [[{}], [{}], [{7: tuple(STORY[3:6])}]]
