"""Drafts of a target's head are passed on once, as far as they are wanted."""

import pytest

from specdec.config.speculation.head_methods import MedusaConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.config.speculation.target_lookup import with_lookup_on_ranks
from specdec.sequences.sequence import HeadDraft
from specdec.speculation.proposers import DraftRequest, ProposalAhead, make_proposer
from specdec.speculation.proposers.target_head import TargetHeadProposer
from tests.specdec.speculation.proposers.sequences import sequence


def drafted(seq, count, proposer=None):
    proposer = proposer or TargetHeadProposer(MedusaConfig(model="head"))
    return [
        (each.base_length, each.base_token, each.draft_token_ids, each.method)
        for each in proposer.take([DraftRequest(seq, count)])
    ]


def test_a_draft_is_shortened_to_what_is_wanted_now():
    seq = sequence(1, [5, 6])
    seq.head_draft = HeadDraft(2, 6, (7, 8, 9))
    assert drafted(seq, 2) == [(2, 6, (7, 8), None)]
    assert drafted(seq, 5) == [(2, 6, (7, 8, 9), None)]


def test_a_sequence_without_a_draft_gets_none():
    assert drafted(sequence(1, [5, 6]), 3) == [(2, 6, (), None)]


def test_a_step_ahead_takes_its_drafts_on_the_ranks():
    proposer = TargetHeadProposer(MedusaConfig(model="head"))
    assert proposer.propose_ahead([DraftRequest(sequence(1, [5, 6]), 3)]) == [
        ProposalAhead(1, num_held_drafts=3)
    ]


def test_the_head_drafts_where_a_lookup_before_it_has_no_full_draft():
    speculation = SpeculativeConfig.of("medusa", model="head", first="ngram", prompt_lookup_min=1)
    proposer = make_proposer(speculation)
    seq = sequence(1, [5, 6, 5])
    seq.head_draft = HeadDraft(3, 5, (7,))
    assert drafted(seq, 2, proposer) == [(3, 5, (6, 5), "ngram")]
    unseen = sequence(2, [5, 6, 7])
    unseen.head_draft = HeadDraft(3, 7, (8, 9))
    assert drafted(unseen, 2, proposer) == [(3, 7, (8, 9), "medusa")]


def test_a_draft_of_a_rank_is_of_the_method_that_the_request_names():
    ngram = {"method": "ngram", "prompt_lookup_min": 1}
    speculation = with_lookup_on_ranks(SpeculativeConfig.of("medusa", model="head", first=ngram))
    proposer = make_proposer(speculation)
    for method, tokens in ((None, (7, 8)), ("ngram", (7, 8)), ("medusa", ())):
        seq = sequence(1, [5, 6, 5], method=method)
        seq.head_draft = HeadDraft(3, 5, (7, 8), method="ngram")
        [proposal] = proposer.take([DraftRequest(seq, 2, method=method)])
        assert proposal.draft_token_ids == tokens
        assert proposal.method == ("ngram" if tokens else None)


TREE = HeadDraft(2, 6, (7, 8, 9, 10, 11), (-1, -1, 0, 1, 2))


@pytest.mark.parametrize(
    ("depth", "num_nodes", "tokens", "parents"),
    [
        (3, 8, (7, 8, 9, 10, 11), (-1, -1, 0, 1, 2)),
        (2, 8, (7, 8, 9, 10), (-1, -1, 0, 1)),
        (1, 8, (7, 8), (-1, -1)),
        (2, 3, (7, 8, 9), (-1, -1, 0)),
        (3, 0, (7, 9, 11), None),
        (2, 2, (7, 9), None),
    ],
)
def test_a_tree_is_cut_to_what_is_wanted_now(depth, num_nodes, tokens, parents):
    seq = sequence(1, [5, 6])
    seq.head_draft = TREE
    proposer = TargetHeadProposer(MedusaConfig(model="head"))
    [proposal] = proposer.take([DraftRequest(seq, depth, max_nodes=num_nodes)])
    assert (proposal.draft_token_ids, proposal.parents) == (tokens, parents)


def test_a_chain_stays_one_where_a_tree_is_wanted():
    seq = sequence(1, [5, 6])
    seq.head_draft = HeadDraft(2, 6, (7, 8, 9))
    proposer = TargetHeadProposer(MedusaConfig(model="head"))
    [proposal] = proposer.take([DraftRequest(seq, 2, max_nodes=6)])
    assert (proposal.draft_token_ids, proposal.parents) == ((7, 8), None)
