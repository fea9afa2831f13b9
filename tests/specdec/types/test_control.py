"""Tests of speculation rules by request rate."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.types.control import (
    LEAVING_SHARE,
    RateRule,
    SpeculationChange,
    SpeculationControl,
    SpeculationState,
    active_rule,
    check_rules,
)
from specdec.types.errors import InvalidValueError

RULES = (
    RateRule(5, num_speculative_tokens=2),
    RateRule(10, num_speculative_tokens=1),
    RateRule(20, mode="off"),
)


@pytest.mark.parametrize(
    ("rate", "active", "expected"),
    [
        (4.9, None, None),
        (5, None, 0),
        (19.9, None, 1),
        (100, None, 2),
        (16, 2, 2),
        (15.9, 2, 1),
        (8, 1, 1),
        (7.9, 1, 0),
        (7.9, 2, 0),
        (4, 2, 0),
        (3.9, 2, None),
        (100, 0, 2),
        (0, 7, None),
    ],
)
def test_a_rule_is_left_at_a_lower_rate_than_it_is_entered(rate, active, expected):
    assert active_rule(RULES, rate, active) == expected


@given(st.lists(st.floats(0, 40), max_size=50))
def test_the_active_rule_matches_the_rate(rates):
    active = None
    for rate in rates:
        active = active_rule(RULES, rate, active)
        if active is not None:
            assert rate >= LEAVING_SHARE * RULES[active].min_requests_per_s
        above = RULES[0 if active is None else active + 1 :]
        assert all(rate < rule.min_requests_per_s for rule in above)


def test_a_rule_keeps_the_settings_it_does_not_name():
    control = SpeculationControl("auto", 32, 3, method="ngram")
    applied = RULES[2].applied_to(control)
    assert (applied.mode, applied.num_speculative_tokens, applied.method) == ("off", 3, "ngram")
    assert applied.is_by_rule
    shorter = RateRule(1.0, num_speculative_tokens=1).applied_to(SpeculationControl("on", 32, 3))
    assert not shorter.is_by_rule, "the mode is the operator's"


@pytest.mark.parametrize(
    ("rules", "field"),
    [
        ((RateRule(-1, "off"),), "rules[0].min_requests_per_s"),
        ((RateRule(float("nan"), "off"),), "rules[0].min_requests_per_s"),
        ((RateRule(True, "off"),), "rules[0].min_requests_per_s"),
        ((RateRule(1, "maybe"),), "rules[0].mode"),
        ((RateRule(1, None, 33),), "rules[0].num_speculative_tokens"),
        ((RateRule(1, "off"), RateRule(1, "on")), "rules[1].min_requests_per_s"),
        (tuple(RateRule(n, "off") for n in range(17)), "rules"),
    ],
)
def test_invalid_rules_are_rejected(rules, field):
    with pytest.raises(InvalidValueError) as caught:
        check_rules(rules)
    assert caught.value.field == field


def test_limits_are_written_as_whole_numbers():
    with pytest.raises(InvalidValueError, match=r"from 0 to 1000000$"):
        check_rules((RateRule(-1, "off"),))
    with pytest.raises(InvalidValueError, match=r"from 0 to 2592000$"):
        SpeculationChange(ttl_s=-1)


def test_a_state_is_described_in_one_line():
    control = SpeculationControl("auto", 4, 3)
    state = SpeculationState(control, control, control, (), 2, None, "ann@host", "", RULES, 1)
    text = "version 2: mode auto, threshold 4, 3 draft tokens, method any, by rule 1"
    assert state.describe() == f"{text}, set by ann@host"
