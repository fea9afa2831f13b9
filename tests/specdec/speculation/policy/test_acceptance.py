"""Tests of acceptance by position over a window with exponential decay."""

import pytest

from specdec.speculation.policy.acceptance import AcceptanceEstimator
from specdec.types.drafts.draft_decision import chains


def filled(rows, now_s=0.0):
    window = AcceptanceEstimator()
    for num_asked, num_accepted in rows:
        window.record(num_asked, num_accepted, now_s)
    return window


def test_an_unobserved_position_has_the_estimate_of_the_previous_one():
    window = AcceptanceEstimator()
    assert window.expected_tokens(chains(2), 0.0) == pytest.approx([1, 1.7, 1.7 + 0.7**2])


def test_a_hand_worked_case():
    """Eight drafts of three: four reach position 2, two position 3, where none is right."""
    window = filled([(3, 0)] * 4 + [(3, 1)] * 2 + [(3, 2)] * 2)
    first = (4 + 4 * 0.7) / (8 + 4)
    second = (2 + 4 * first) / (4 + 4)
    third = (0 + 4 * second) / (2 + 4)
    assert window.expected_tokens(chains(3), 0.0) == pytest.approx(
        [1, 1 + first, 1 + first + first * second, 1 + first * (1 + second * (1 + third))]
    )


def test_short_drafts_do_not_change_estimates_of_later_positions():
    window = filled([(1, 1)] * 50)
    one, two = window.expected_tokens(chains(2), 0.0)[1:]
    assert two - one == pytest.approx((one - 1) ** 2)


def test_a_pause_keeps_the_estimate_of_the_first_position():
    window = filled([(3, 0)] * 200)
    assert window.expected_tokens(chains(1), 3600.0)[1] < 1.2


def test_after_a_pause_a_few_drafts_outweigh_old_observations():
    window = filled([(3, 0)] * 10_000)
    for _ in range(32):
        window.record(1, 1, 60.0)
    assert window.expected_tokens(chains(1), 60.0)[1] > 1.6


def test_later_positions_become_unknown_within_two_minutes():
    window = filled([(3, 1)] * 10_000)
    assert window.expected_tokens(chains(2), 0.0)[2] < 2.1
    for second in range(1, 121):
        window.record(1, 1, float(second))
    one, two = window.expected_tokens(chains(2), 120.0)[1:]
    assert two - one > 0.75


def test_old_observations_decay():
    window = filled([(1, 1)] * 256)
    for _ in range(64):
        window.record(1, 0, 20.0)
    assert window.expected_tokens(chains(1), 20.0)[1] == pytest.approx(
        1 + (64 + 2.8) / (64 + 64 + 4)
    )
