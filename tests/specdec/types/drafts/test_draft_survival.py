"""Tests of the division of draft tokens by survival."""

from itertools import product

import pytest
import torch

from specdec.sampling.verifiers import Draft
from specdec.types.drafts.draft_survival import (
    AcceptanceHistory,
    ConfidenceHistory,
    share_by_survival,
)
from specdec.types.messages import DraftProbs
from tests.specdec.sampling.verifiers.trials import sampling_batch, verified_by


def expected_tokens(rates, shares):
    """Return the expected number of accepted tokens of geometric drafts."""
    return sum(
        rate**place for rate, n in zip(rates, shares, strict=True) for place in range(1, n + 1)
    )


def constant(rates, limits):
    """Return the rates of each token, equal along a draft."""
    return [[rate] * limit for rate, limit in zip(rates, limits, strict=True)]


@pytest.mark.parametrize("budget", range(9))
@pytest.mark.parametrize(
    "rates", [(0.9, 0.5, 0.2), (0.7, 0.7, 0.7), (0.95, 0.94, 0.05), (0.0, 0.6, 0.3)]
)
def test_no_other_division_accepts_more(rates, budget):
    limits = (4, 3, 2)
    shares = share_by_survival(constant(rates, limits), budget)
    assert sum(shares) == min(budget, sum(limits))
    assert all(share <= limit for share, limit in zip(shares, limits, strict=True))
    others = product(*(range(limit + 1) for limit in limits))
    best = max(expected_tokens(rates, each) for each in others if sum(each) <= budget)
    assert expected_tokens(rates, shares) == pytest.approx(best)


def test_equal_rates_share_evenly_and_the_first_gets_the_rest():
    assert share_by_survival(constant([0.7] * 3, [8] * 3), 7) == [3, 2, 2]
    assert share_by_survival(constant([0.7] * 3, [8, 0, 1]), 7) == [6, 0, 1]
    assert share_by_survival([], 5) == []


def test_a_confident_draft_is_longer_up_to_its_first_unsure_token():
    sure, unsure = [0.9, 0.9, 0.1, 0.9], [0.5, 0.5]
    assert [share_by_survival([sure, unsure], n) for n in (1, 2, 3, 4, 5)] == [
        [1, 0],
        [2, 0],
        [2, 1],
        [2, 2],
        [3, 2],
    ]


def test_confidences_are_corrected_by_acceptance():
    fresh = too_sure = honest = ConfidenceHistory()
    assert fresh.rate(0.6) == pytest.approx(0.6)
    assert fresh.rate(1.0) < 1
    for _ in range(20):
        too_sure, honest = too_sure.after([0.9] * 4, 0), honest.after([1.0] * 4, 4)
    assert too_sure.rate(0.9) < 0.35
    assert honest.rate(0.6) == pytest.approx(0.6)
    for _ in range(60):
        too_sure = too_sure.after([], 0)
    assert too_sure.rate(0.9) == pytest.approx(0.9, abs=0.02), "without a share it is tried again"


def test_confidences_after_a_rejected_token_are_no_evidence():
    assert ConfidenceHistory().after([0.5, 0.25, 0.9], 1) == ConfidenceHistory(0.75, 1)
    assert ConfidenceHistory().after([0.5], 1) == ConfidenceHistory(0.5, 1)


def test_a_history_follows_its_drafts_and_forgets():
    fresh = good = bad = AcceptanceHistory()
    for _ in range(20):
        good, bad = good.after(4, 4), bad.after(4, 0)
    assert fresh.rate == pytest.approx(0.7)
    assert bad.rate < 0.25
    assert 0.9 < good.rate < 1
    for _ in range(60):
        bad = bad.after(0, 0)
    assert bad.rate == pytest.approx(0.7, abs=0.03), "without a share it is tried again"


def test_tokens_after_a_rejected_one_are_no_evidence():
    assert AcceptanceHistory().after(8, 2) == AcceptanceHistory(3, 2)
    assert AcceptanceHistory().after(2, 2) == AcceptanceHistory(2, 2)


@pytest.mark.parametrize(("sees_token", "share_of_first"), [(False, 0.7), (True, 0.85)])
def test_a_length_that_depends_on_the_token_is_biased(sees_token, share_of_first):
    """The counterexample of docs/speculation.md: p = (0.7, 0.3), q = (0.5, 0.5).

    A rule that verifies token 0 and drops token 1 gives 0.5 + 0.5 * 0.7 = 0.85.
    """
    count = 4000
    drafted = (torch.rand(count, generator=torch.Generator().manual_seed(1)) < 0.5).long().tolist()
    probs = DraftProbs(torch.tensor([[0, 1]]).int().numpy(), torch.full((1, 2), 0.5).numpy())
    drafts = [
        Draft([], probs=None) if sees_token and token == 1 else Draft([token], probs=probs)
        for token in drafted
    ]
    lengths = torch.tensor([len(draft.token_ids) + 1 for draft in drafts])
    seeds = torch.arange(count).repeat_interleave(lengths)
    positions = torch.cat([torch.arange(length) for length in lengths])
    logits = torch.tensor([0.7, 0.3]).log().repeat(int(lengths.sum()), 1)
    batch = sampling_batch(1.0, seeds, positions)
    verified = verified_by("rejection", logits, batch, drafts)
    share = sum(tokens[0] == 0 for tokens in verified) / count
    assert share == pytest.approx(share_of_first, abs=0.035)  # over four standard deviations
