"""Tests of the probabilities of outcomes, from those that occurred."""

import random

import pytest

from specdec.speculation.proposers.outcome_statistics import OutcomeStatistics

RANKS = (0.5, 0.2, 0.1, 0.05)
"""Probability of each rank of the token after a rejection; the rest is beyond."""


def observed(acceptance, num_drafts=3, fan_out=4, count=4000):
    """Return statistics of rounds of a draft model with known acceptance and ranks."""
    generator, statistics = random.Random(3), OutcomeStatistics()
    for _ in range(count):
        accepted = 0
        while accepted < num_drafts and generator.random() < acceptance:
            accepted += 1
        ranks = (acceptance, *(each * (1 - acceptance) for each in RANKS))
        chances = ranks if accepted == num_drafts else RANKS
        [rank] = generator.choices(range(len(chances) + 1), (*chances, 1 - sum(chances)))
        listed = rank if rank < fan_out else None
        statistics.observe(num_drafts, accepted, listed, fan_out)
    return statistics


def test_hit_rates_are_those_of_the_draft_model():
    statistics = observed(0.8)
    rejected, whole = 1 - 0.8**3, 0.8**3
    assert statistics.hit_rate((1, 1, 1, 1)) == pytest.approx(
        rejected * 0.5 + whole * 0.8, abs=0.03
    )
    assert statistics.hit_rate((2, 2, 2, 1)) == pytest.approx(
        rejected * 0.7 + whole * 0.8, abs=0.03
    )
    assert statistics.hit_rate((0, 0, 0, 1)) == pytest.approx(whole * 0.8, abs=0.03)


def test_ranks_beyond_those_that_were_tried_are_no_evidence_against_them():
    """With a fan-out of 1 nothing is known about the second rank but its prior."""
    narrow, wide = observed(0.8, fan_out=1), observed(0.8, fan_out=4)
    assert narrow.hit_rate((1, 1, 1, 1)) == pytest.approx(wide.hit_rate((1, 1, 1, 1)), abs=0.03)
    assert narrow.hit_rate((4, 4, 4, 4)) > narrow.hit_rate((1, 1, 1, 1)) + 0.1


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.95])
@pytest.mark.parametrize("num_branches", [1, 3, 6, 10])
def test_the_fan_out_has_the_highest_hit_rate_of_its_size(acceptance, num_branches):
    statistics = observed(acceptance)
    found = statistics.likeliest(3, num_branches).fan_out(num_branches)
    assert sum(found) == num_branches
    assert found[3] >= 1, "the token after all drafts is always continued"
    for source in range(4):
        for target in range(4):
            other = list(found)
            other[source] -= 1
            other[target] += 1
            if source != target and min(other) >= 0 and other[3] >= 1:
                assert statistics.hit_rate(other) <= statistics.hit_rate(found) + 1e-9


def test_a_draft_model_that_is_always_right_needs_no_other_branches():
    assert observed(1.0).likeliest(3, 12).fan_out(12) == (0, 0, 0, 1)


def test_the_hit_rates_of_the_likeliest_are_those_of_their_fan_outs():
    statistics = observed(0.7)
    found = statistics.likeliest(3, 8)
    for count in range(1, 9):
        assert found.hit_rate(count) == pytest.approx(statistics.hit_rate(found.fan_out(count)))
    assert found.hit_rate(50) == found.hit_rate(8)


def test_the_expected_tokens_are_those_of_the_acceptance():
    expected = observed(0.8).expected_tokens(3)
    assert expected == pytest.approx([1, 1.8, 2.44, 2.952], abs=0.04)
