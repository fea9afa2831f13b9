"""The rule by which a version of a draft head is rolled back."""

import numpy as np
import pytest

from specdec.speculation.policy.rollback import FirstTokens, RollbackRule

RULE = RollbackRule()


def test_looks_are_after_each_doubling():
    assert RULE.looks == {64, 128, 256, 512, 1024}
    assert RollbackRule(min_drafts=10, window=39).looks == {10, 20}


@pytest.mark.parametrize(
    ("before", "now", "is_worse"),
    [
        ((1024, 614), (64, 2), True),
        ((64, 40), (64, 2), True),
        ((1024, 614), (1024, 512), True),
        ((1024, 614), (64, 34), False),  # 0.53 of 64 can be chance
        ((1024, 614), (64, 64), False),
        ((63, 60), (1024, 0), False),  # nothing to compare with
        ((1024, 1024), (63, 0), False),
        ((1024, 0), (64, 0), False),
        ((1024, 1024), (64, 64), False),
        ((10**6, 600_000), (10**6, 590_000), False),  # certain, but within the margin
        ((10**6, 600_000), (10**6, 570_000), True),
    ],
)
def test_a_version_is_worse_by_more_than_chance_and_margin(before, now, is_worse):
    assert RULE.is_worse(FirstTokens(*before), FirstTokens(*now)) == is_worse


def alarms(before, now, num_runs, block=1):
    """Return the share of runs with a rollback; drafts of a block have the same outcome."""
    generator = np.random.default_rng(1)
    window = RULE.window // block
    baseline = generator.binomial(window, before, num_runs) * block
    outcomes = generator.random((num_runs, window)) < now
    accepted = np.cumsum(np.repeat(outcomes, block, axis=1), axis=1)
    return np.mean(
        [
            any(
                RULE.is_worse(
                    FirstTokens(RULE.window, int(baseline[run])),
                    FirstTokens(look, int(accepted[run, look - 1])),
                )
                for look in RULE.looks
            )
            for run in range(num_runs)
        ]
    )


def test_an_equal_version_stays():
    # At most 1.6e-4 a run: more than 4 of 2000 have a probability below 1e-4.
    assert alarms(0.6, 0.6, 2000) <= 4 / 2000


def test_an_equal_version_stays_where_drafts_are_alike():
    # At most 1.2 % a run, so 24 of 2000; more than 45 have a probability below 1e-4.
    assert alarms(0.6, 0.6, 2000, block=2) <= 45 / 2000


def test_a_worse_version_is_found():
    assert alarms(0.6, 0.45, 200) > 0.99
    assert alarms(0.6, 0.02, 50) == 1.0
