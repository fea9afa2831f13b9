"""Tests of the rule that leaves out draft tokens which rarely survive."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.types.drafts.draft_survival import AcceptanceHistory
from specdec.types.drafts.slot_rule import SlotRule, survivals

PRIOR = AcceptanceHistory(4.0, 2.0)
RULE = SlotRule(0.25, PRIOR)


@pytest.mark.parametrize(
    ("num_verified", "num_accepted", "length"),
    [(0, 0, 2), (96, 78, 6), (96, 94, 8), (96, 8, 0), (96, 24, 1), (1, 1, 3), (1, 0, 1)],
)
def test_a_draft_goes_on_while_its_survival_is_large_enough(num_verified, num_accepted, length):
    """Products of (2 + accepted + n) / (4 + verified + n) are compared with 0.25."""
    assert RULE.length(AcceptanceHistory(num_verified, num_accepted), 8) == length


def test_survival_is_the_mean_of_powers_of_the_rate():
    """The distribution is beta(3, 2): the prior and one accepted token."""
    moments = [3 / 5, 3 * 4 / (5 * 6), 3 * 4 * 5 / (5 * 6 * 7)]
    assert [*survivals(AcceptanceHistory(1.0, 1.0), PRIOR, 3)] == pytest.approx(moments)
    known = survivals(AcceptanceHistory(8000.0, 4000.0), PRIOR, 3)
    assert [*known] == pytest.approx([0.5, 0.25, 0.125], rel=1e-3)


@given(st.floats(0.01, 0.9), st.floats(0.0, 50.0), st.floats(0.0, 1.0), st.integers(0, 32))
def test_the_last_token_survives_often_enough_and_the_next_one_does_not(least, count, share, most):
    history = AcceptanceHistory(count, share * count)
    length = SlotRule(least, PRIOR).length(history, most)
    found = [*survivals(history, PRIOR, most + 1)]
    assert 0 <= length <= most
    assert all(each >= least for each in found[:length])
    assert length == most or found[length] < least
