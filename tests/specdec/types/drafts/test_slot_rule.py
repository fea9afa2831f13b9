"""Tests of the rule that leaves out draft tokens which rarely survive."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.types.drafts.draft_survival import AcceptanceHistory
from specdec.types.drafts.slot_rule import SlotRule

RULE = SlotRule(least_survival=0.25, rate=0.5, weight=4.0)


@pytest.mark.parametrize(
    ("num_verified", "num_accepted", "length"),
    [(0, 0, 2), (96, 78, 6), (96, 93, 8), (96, 8, 0), (96, 23, 1), (96, 100, 8)],
)
def test_a_draft_goes_on_while_its_survival_is_large_enough(num_verified, num_accepted, length):
    """Powers of 0.5, 0.8, 0.95, 0.1, 0.25 and a rate above 1 are compared with 0.25."""
    assert RULE.length(AcceptanceHistory(num_verified, num_accepted), 8) == length


@given(st.floats(0.01, 0.9), st.floats(0.0, 50.0), st.floats(0.0, 1.0), st.integers(0, 32))
def test_the_last_token_survives_often_enough_and_the_next_one_does_not(least, count, share, most):
    rule, history = SlotRule(least, 0.5, 4.0), AcceptanceHistory(count, share * count)
    length, rate = rule.length(history, most), rule.rate_of(history)
    assert 0 <= length <= most
    assert rate**length >= least * (1 - 1e-6)
    assert length == most or rate ** (length + 1) < least * (1 + 1e-6)
