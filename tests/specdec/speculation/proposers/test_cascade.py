"""Tests of the order of proposers in a cascade, and of a draft model that keeps up in it."""

import numpy as np
import pytest

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.speculation.proposers import DraftRequest, Proposal, make_proposer
from specdec.speculation.proposers.cascade import CascadeProposer, Stage
from specdec.speculation.proposers.draft_model import MAX_PENDING_TOKENS
from specdec.types.messages import DraftProbs
from tests.specdec.engines import draft_model
from tests.specdec.speculation.proposers.sequences import drafts, sequence

STORY = [1, 2, 3, 4, 5, 6, 7, 99, 1, 2, 3]


class Scripted:
    """A proposer that drafts a fixed token for the sequences in `knows` and records requests."""

    def __init__(self, token, knows, most=100) -> None:
        self.token = token
        self.knows = knows
        self.most = most
        self.asked: dict[int, int] = {}
        self.sent: list[int] = []
        self.ended: list[bool] = []
        self.released: list[int] = []

    def take(self, requests):
        self.asked = {each.seq.seq_id: each.max_tokens for each in requests}
        return [
            Proposal(
                each.seq.seq_id,
                each.seq.num_tokens,
                each.seq.token_ids[-1],
                (self.token,) * min(self.most, each.max_tokens),
            )
            for each in requests
            if each.seq.seq_id in self.knows
        ]

    def ahead(self, rows):
        self.sent = [row.seq.seq_id for row in rows]

    def end_step(self, *, is_lost=False):
        self.ended.append(is_lost)

    def release(self, seq_id):
        self.released.append(seq_id)


def model_stage(method, proposer):
    """Return the stage of a model."""
    return Stage(method, proposer, is_model=True)


@pytest.fixture
def first():
    return Scripted(1, knows={10})


@pytest.fixture
def model():
    return Scripted(2, knows={10, 20})


@pytest.fixture
def fallback():
    return Scripted(3, knows={10, 20, 30})


@pytest.fixture
def combined(first, model, fallback):
    return CascadeProposer(
        [Stage("ngram", first), model_stage("draft_model", model), Stage("suffix", fallback)]
    )


def test_each_proposer_gets_the_sequences_without_a_draft(combined, first, model, fallback):
    seqs = [sequence(seq_id, [5, 6]) for seq_id in (10, 20, 30, 40)]
    assert drafts(combined, *seqs) == [(1,) * 7, (2,) * 7, (3,) * 7, ()]
    assert first.asked == {10: 7, 20: 7, 30: 7, 40: 7}
    assert model.asked == {10: 0, 20: 7, 30: 7, 40: 7}
    assert fallback.asked == {10: 0, 20: 0, 30: 7, 40: 7}


def test_a_draft_reports_its_method(combined):
    seqs = [sequence(seq_id, [5, 6]) for seq_id in (10, 20, 30)]
    taken = combined.take([DraftRequest(seq, 7) for seq in seqs])
    assert {each.seq_id: each.method for each in taken} == {
        10: "ngram",
        20: "draft_model",
        30: "suffix",
    }


def test_a_short_lookup_draft_is_used_if_the_model_has_none(combined, first, model):
    first.most, first.knows = 3, {10, 40}
    seqs = [sequence(seq_id, [5, 6]) for seq_id in (10, 40)]
    assert drafts(combined, *seqs) == [(2,) * 7, (1,) * 3]
    assert model.asked == {10: 7, 40: 7}


def test_a_short_draft_of_the_model_is_enough(combined, model, fallback):
    model.most = 2
    assert drafts(combined, sequence(20, [5, 6])) == [(2, 2)]
    assert fallback.asked == {20: 0}


def test_a_cascade_may_hold_only_a_draft_model(model):
    seqs = [sequence(seq_id, [5, 6]) for seq_id in (10, 20, 30)]
    cascade = CascadeProposer([model_stage("draft_model", model)])
    assert drafts(cascade, *seqs, count=1) == [(2,), (2,), ()]


def test_two_models_wait_for_each_other(first, model, fallback):
    """A head on another worker and a draft model after it, with a lookup between them."""
    stages = [
        model_stage("head", first),
        Stage("ngram", fallback),
        model_stage("draft_model", model),
    ]
    model.knows, fallback.knows, fallback.most = {10, 20, 30, 40}, {30}, 2
    seqs = [sequence(seq_id, [5, 6]) for seq_id in (10, 20, 30, 40)]
    assert drafts(CascadeProposer(stages), *seqs) == [(1,) * 7, (2,) * 7, (2,) * 7, (2,) * 7]
    assert fallback.asked == {10: 0, 20: 7, 30: 7, 40: 7}
    assert model.asked == {10: 0, 20: 7, 30: 7, 40: 7}


def test_a_model_keeps_a_short_draft_of_a_model_before_it(first, model):
    """The first ends its draft where it is not sure, which is no reason to ask another model."""
    first.most = 2
    stages = [Stage("head", first, is_model=True), model_stage("draft_model", model)]
    seqs = [sequence(seq_id, [5, 6]) for seq_id in (10, 20)]
    assert drafts(CascadeProposer(stages), *seqs) == [(1, 1), (2,) * 7]
    assert model.asked == {10: 0, 20: 7}


def test_a_model_that_answers_at_once_replaces_shorter_drafts_of_lookups(first, model):
    first.most = 2
    stages = [Stage("ngram", first), Stage("head", model, is_model=True)]
    seqs = [sequence(seq_id, [5, 6]) for seq_id in (10, 20)]
    assert drafts(CascadeProposer(stages), *seqs) == [(2,) * 7, (2,) * 7]


def test_a_sampled_draft_is_kept_whatever_length_its_tokens_have_led_to(first, model):
    """Rejection sampling assumes that a draft is verified whichever tokens were sampled.

    With p = q, a draft that is kept only where its first token is in a set A would be accepted for
    each of these, and p be sampled otherwise: tokens of A would be 2 - q(A) times too likely.
    """

    class Sampling(Scripted):
        def take(self, requests):
            return [
                each._replace(draft_probs=DraftProbs(*certain(each.draft_token_ids)))
                for each in super().take(requests)
            ]

    def certain(token_ids):
        ids = np.array(token_ids, np.int32).reshape(-1, 1)
        return ids, np.ones(ids.shape, np.float32)

    first.most = 3
    kept = []
    for length in (0, 1, 2, 5):
        model = Sampling(2, knows={10}, most=length)
        cascade = CascadeProposer([Stage("ngram", first), model_stage("draft_model", model)])
        kept += drafts(cascade, sequence(10, [5, 6]))
    assert kept == [(1,) * 3, (2,), (2,) * 2, (2,) * 5]


def test_guesses_without_a_draft_run_where_nothing_drafts(model):
    class Guessing(Scripted):
        def take(self, requests):
            return [each._replace(lookahead_token_ids=(9,)) for each in super().take(requests)]

    ahead = Guessing(4, knows={20, 30}, most=0)
    cascade = CascadeProposer([Stage("lookahead", ahead), model_stage("draft_model", model)])
    requests = [DraftRequest(sequence(seq_id, [5, 6]), 3, 2) for seq_id in (20, 30)]
    drafted, guessed = sorted(cascade.take(requests), key=lambda each: each.seq_id)
    assert (drafted.draft_token_ids, drafted.lookahead_token_ids) == ((2, 2, 2), ())
    assert (guessed.draft_token_ids, guessed.lookahead_token_ids) == ((), (9,))


def test_a_request_that_names_a_method_gets_only_that_one(combined, first, model, fallback):
    methods = {10: "suffix", 20: "ngram", 21: "draft_model", 30: "draft_model"}
    model.knows = {21}
    seqs = [sequence(seq_id, [5, 6], method=method) for seq_id, method in methods.items()]
    assert drafts(combined, *seqs, count=1) == [(3,), (), (2,), ()]
    assert set(first.asked) == {20}
    assert set(model.asked) == {21, 30}
    assert set(fallback.asked) == {10}


def test_release_reaches_every_proposer(combined, first, model, fallback):
    combined.release(10)
    assert first.released == model.released == fallback.released == [10]


def test_a_draft_is_not_reused_in_the_next_step(combined, first):
    seq = sequence(10, [5, 6])
    assert drafts(combined, seq, count=1) == [(1,)]
    first.knows = {}
    assert drafts(combined, seq, count=1) == [(2,)]


def test_a_draft_model_keeps_up_with_what_lookups_draft(tiny_model_dir):
    """It can draft at once when the lookup no longer finds a match."""
    model = draft_model(tiny_model_dir, max_model_len=400, max_catch_up_tokens=64)
    combined = make_proposer(SpeculativeConfig.of("draft_model", first="ngram"), model)
    seq = sequence(1, [7, 8, 9, 10] * 20)
    for _ in range(40):
        assert drafts(combined, seq, count=3) == [tuple(seq.token_ids[-4:-1])]
        seq.token_ids += seq.token_ids[-4:]
    assert seq.num_tokens - model._progress[1].num_computed_tokens <= MAX_PENDING_TOKENS + 4
    seq.token_ids += [200, 201]
    assert len(drafts(combined, seq, count=3)[0]) == 3
    model.check_integrity()


def test_no_configuration_makes_no_proposer():
    assert make_proposer(None) is None


def test_every_stage_receives_the_end_of_a_step():
    stages = [Scripted(1, {1}), Scripted(2, {1})]
    cascade = CascadeProposer([Stage("ngram", stages[0]), model_stage("draft_model", stages[1])])
    cascade.end_step()
    cascade.end_step(is_lost=True)
    assert [each.ended for each in stages] == [[False, True]] * 2


@pytest.mark.parametrize(
    ("texts", "is_ahead"),
    [([STORY], True), ([STORY, STORY[:7]], False), ([STORY, STORY[:9]], False)],
    ids=["all", "some", "one short"],
)
def test_a_step_begins_ahead_where_the_lookup_drafts_for_all(first, texts, is_ahead):
    """The draft model receives every sequence, so that it catches up.

    It would draft in place of a short draft of the lookup.
    """
    lookup = make_proposer(SpeculativeConfig.of("suffix"))
    cascade = CascadeProposer([Stage("suffix", lookup), model_stage("draft_model", first)])
    assert cascade.guesses_outcomes
    requests = [DraftRequest(sequence(place, text), 3) for place, text in enumerate(texts)]
    ahead = cascade.propose_ahead(requests)
    assert (ahead is not None) == is_ahead
    assert first.asked == ({0: 0} if is_ahead else {})
    if ahead is not None:
        [found] = ahead
        assert found.method == "suffix"
        assert found.drafts_by_token == ((4, 5, 6, 7),)


def test_nothing_is_guessed_for_a_request_that_names_the_draft_model(first):
    lookup = make_proposer(SpeculativeConfig.of("suffix"))
    cascade = CascadeProposer([Stage("suffix", lookup), model_stage("draft_model", first)])
    assert (
        cascade.propose_ahead([DraftRequest(sequence(0, STORY), 3, method="draft_model")]) is None
    )


def test_ahead_each_stage_receives_its_own_requests(first):
    second, lookup = Scripted(2, set()), make_proposer(SpeculativeConfig.of("suffix"))
    stages = [model_stage("draft_model", first), model_stage("other", second)]
    cascade = CascadeProposer([Stage("suffix", lookup), *stages])
    methods = [None, "suffix", "other"]
    requests = [
        DraftRequest(sequence(place, STORY), 3 if method != "other" else 0, method=method)
        for place, method in enumerate(methods)
    ]
    ahead = cascade.propose_ahead(requests)
    assert [each.seq_id for each in ahead] == [0, 1]
    assert (first.asked, second.asked) == ({0: 0}, {0: 0, 2: 0})


@pytest.mark.parametrize("second", ["ngram", "suffix"])
def test_only_cascades_of_a_suffix_lookup_and_a_worker_guess(first, second):
    lookups = [make_proposer(SpeculativeConfig.of(name)) for name in ("suffix", second)]
    other_order = CascadeProposer([model_stage("draft_model", first), Stage("suffix", lookups[0])])
    two_lookups = CascadeProposer([Stage("suffix", lookups[0]), Stage(second, lookups[1])])
    for cascade in (other_order, two_lookups):
        assert not cascade.guesses_outcomes
        assert cascade.propose_ahead([DraftRequest(sequence(0, STORY), 3)]) is None
