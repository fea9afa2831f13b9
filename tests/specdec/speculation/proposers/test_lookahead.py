"""Tests of the lookahead window and its n-grams against a target with known answers."""

from itertools import pairwise

import pytest

from specdec.config.speculation.methods import LookaheadConfig
from specdec.sequences.sequence import Lookahead
from specdec.speculation.proposers import DraftRequest
from specdec.speculation.proposers.lookahead import LookaheadProposer
from tests.specdec.speculation.proposers.sequences import sequence

PROMPT = [10, 30, 50]


def make_proposer(ngram_size, pool_size):
    config = LookaheadConfig(lookahead_ngram_size=ngram_size, lookahead_pool_size=pool_size)
    return LookaheadProposer(config)


def propose(proposer, seq, max_tokens=2, window=4):
    [proposal] = proposer.take([DraftRequest(seq, max_tokens, window)])
    assert (proposal.base_length, proposal.base_token) == (seq.num_tokens, seq.token_ids[-1])
    return proposal


def step(seq, proposal, target, num_run=None):
    """Apply a proposal as the engine does; `target` returns the token that follows a token."""
    drafts, window = proposal.draft_token_ids, proposal.lookahead_token_ids[:num_run]
    base_length, new = seq.num_tokens, [target(seq.token_ids[-1])]
    for draft in drafts:
        if draft != new[-1]:
            break
        new.append(target(draft))
    answers = tuple(target(token) for token in drafts + window)
    seq.token_ids += new
    seq.lookahead = Lookahead(base_length, drafts, window, answers)
    return len(new)


def successor(token):
    return (token + 1) % 60


def test_guesses_start_from_the_text_and_continue_with_the_targets_tokens():
    seq, proposer = sequence(1, PROMPT), make_proposer(ngram_size=3, pool_size=100)
    first = propose(proposer, seq)
    assert first.draft_token_ids == ()
    assert set(first.lookahead_token_ids) <= set(PROMPT)
    step(seq, first, successor)
    second = propose(proposer, seq, max_tokens=1)
    expected = tuple(map(successor, first.lookahead_token_ids))
    num_drafts = len(second.draft_token_ids)
    # One token was accepted, so the answer to the first guess predicts the next token.
    kept = expected[num_drafts:]
    assert second.lookahead_token_ids[: len(kept)] == kept


@pytest.mark.parametrize("num_run", [0, 2, 4])
def test_a_text_that_never_repeats_is_drafted(num_run):
    """No token occurs twice, but the target predicted it in an earlier window."""
    seq, proposer = sequence(1, PROMPT), make_proposer(ngram_size=4, pool_size=500)
    num_steps = 0
    while 49 not in seq.token_ids:
        step(seq, propose(proposer, seq), successor, num_run)
        num_steps += 1
    assert seq.token_ids[3:] == [token % 60 for token in range(51, 51 + len(seq.token_ids) - 3)]
    assert (num_steps < 50) == (num_run > 0)


def test_ngrams_are_the_targets_answers_of_successive_steps():
    """Every n-gram beyond the text is a run of target answers with the configured length."""
    seq, proposer = sequence(1, PROMPT), make_proposer(ngram_size=4, pool_size=500)
    for _ in range(6):
        # Answers differ by seven, so no draft is accepted and only the window yields n-grams.
        step(seq, propose(proposer, seq, max_tokens=1), lambda token: token + 7)
    pool = proposer._windows[1].pool
    ahead = {key: token for key, token in pool._followers.items() if token not in seq.token_ids}
    assert max(map(len, ahead)) == 3
    for context, token in ahead.items():
        ngram = [*context, token]
        assert all(after == before + 7 for before, after in pairwise(ngram))


def test_a_step_without_a_lookahead_restarts_the_window():
    seq, proposer = sequence(1, PROMPT), make_proposer(ngram_size=3, pool_size=100)
    step(seq, propose(proposer, seq), successor)
    seq.token_ids.append(99)
    seq.lookahead = None
    again = propose(proposer, seq)
    assert set(again.lookahead_token_ids) <= set(seq.token_ids)
    proposer.release(1)
    fresh = make_proposer(ngram_size=3, pool_size=100)
    assert propose(proposer, seq) == propose(fresh, seq)


def test_a_request_for_no_draft_tokens_creates_no_window():
    proposer = make_proposer(ngram_size=3, pool_size=100)
    assert proposer.take([DraftRequest(sequence(1, PROMPT), 0)]) == []
    assert proposer._windows == {}
    proposer.release(7)


def test_memory_stays_within_the_pool():
    seq, proposer = sequence(1, list(range(500))), make_proposer(ngram_size=4, pool_size=60)
    for _ in range(10):
        step(seq, propose(proposer, seq), successor)
    assert len(proposer._windows[1].pool) == 60
