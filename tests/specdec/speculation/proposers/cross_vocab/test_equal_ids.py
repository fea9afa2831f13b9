"""Tests of draft models that differ only in vocabulary padding and IDs of special tokens."""

import numpy as np
import pytest

from specdec.sequences.sequence import Sequence
from specdec.speculation.proposers import DraftRequest, DraftVocabulary
from specdec.text.vocab_map import VocabularyMap
from specdec.types.sampling.sampling_spec import SamplingRules, Verifier
from tests.specdec.engines import draft_model, request
from tests.specdec.fakes import run_ranks

VOCAB_SIZE = 383
MISSING = range(150, 250)
SWAPPED = {100: 300, 300: 100}
NUM_TOKENS = 3


@pytest.fixture
def vocabulary():
    """Return a map with tokens that only one model has, and tokens with swapped IDs."""
    ids = np.arange(VOCAB_SIZE, dtype=np.int32)
    ids[MISSING.start : MISSING.stop] = -1
    for one, other in SWAPPED.items():
        ids[one] = other
    return DraftVocabulary(VocabularyMap(ids, ids.copy(), has_equal_ids=True))


def sequences(count, verifier):
    """Return requests that make tokens with different IDs and missing tokens likely."""
    likely = tuple((token, 12.0) for token in (*SWAPPED, 160, 170))
    for index in range(count):
        rules = SamplingRules(1.0, seed=index, verifier=Verifier(verifier), logit_bias=likely)
        yield Sequence(index, request(str(index), [5, 6, 7 + index]), rules, detokenizer=None)


def drafted(proposer, verifier):
    return proposer.take([DraftRequest(seq, NUM_TOKENS) for seq in sequences(40, verifier)])


@pytest.mark.parametrize("verifier", ["rejection", "block"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_draft_probabilities_cover_the_targets_vocabulary(
    tiny_model_dir, vocabulary, verifier, num_ranks
):
    """A token with draft probability 0 would be accepted at any target probability."""
    ranks = run_ranks(
        num_ranks,
        lambda group: drafted(draft_model(tiny_model_dir, group, vocabulary=vocabulary), verifier),
    )
    for proposal in ranks[0]:
        assert len(proposal.draft_token_ids) == NUM_TOKENS, "a draft token was dropped"
        for place, token in enumerate(proposal.draft_token_ids):
            listed = proposal.draft_probs.token_ids[place]
            probs = proposal.draft_probs.probs[place]
            assert probs[listed == token].sum() > 0
            assert not np.isin(listed[probs > 0], MISSING).any()
            assert probs.sum() == pytest.approx(1, abs=1e-5)
    assert {token for each in ranks[0] for token in each.draft_token_ids} >= set(SWAPPED)


def test_drafts_by_shared_noise_never_contain_a_token_that_the_target_lacks(
    tiny_model_dir, vocabulary
):
    proposals = drafted(draft_model(tiny_model_dir, vocabulary=vocabulary), "coupled")
    assert {len(each.draft_token_ids) for each in proposals} == {NUM_TOKENS}
