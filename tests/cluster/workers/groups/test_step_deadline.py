from statistics import median

import pytest

from cluster.workers.groups.step_deadline import MIN_SAMPLES, StepDeadline


@pytest.fixture
def deadline():
    return StepDeadline(min_s=5.0, max_s=60.0, factor=20.0)


def after(deadline, num_tokens, seconds, count=MIN_SAMPLES):
    for _ in range(count):
        deadline.record(num_tokens, seconds)
    return deadline.limit_s(num_tokens)


def test_the_first_steps_of_a_size_have_the_full_limit(deadline):
    assert after(deadline, 1, 0.01, MIN_SAMPLES - 1) == 60.0
    assert after(deadline, 1, 0.01, 1) == 5.0


@pytest.mark.parametrize(("seconds", "limit_s"), [(0.01, 5.0), (0.5, 10.0), (7.0, 60.0)])
def test_a_limit_is_a_multiple_of_the_longest_step_within_bounds(deadline, seconds, limit_s):
    assert after(deadline, 4, seconds) == limit_s


def test_prefill_has_a_separate_limit(deadline):
    assert after(deadline, 4, 0.01) == 5.0
    assert deadline.limit_s(256) == 60.0
    assert after(deadline, 256, 1.0) == 20.0
    assert deadline.limit_s(4) == 5.0


def test_one_slow_step_raises_the_limit_until_it_leaves_the_window(deadline):
    assert after(deadline, 1, 0.01) == 5.0
    deadline.record(1, 2.0)
    assert deadline.limit_s(1) == 40.0
    assert after(deadline, 1, 0.01, 64) == 5.0


def test_a_new_size_may_share_the_limit_of_the_slowest_other():
    shared = StepDeadline(0.1, 10.0, 5.0, shares_sizes=True)
    assert shared.limit_s(1) == 10.0
    assert after(shared, 4, 0.1) == 0.5
    assert after(shared, 16, 0.2) == 1.0
    assert shared.limit_s(1) == 1.0


def test_one_slow_step_does_not_raise_a_limit_by_the_median():
    patience = StepDeadline(0.1, 10.0, 5.0, median)
    assert after(patience, 1, 0.1) == 0.5
    patience.record(1, 2.0)
    assert patience.limit_s(1) == 0.5


def test_steps_that_stay_late_replace_those_before():
    patience = StepDeadline(0.1, 10.0, 5.0, median, shares_sizes=True)
    assert after(patience, 1, 0.03) == after(patience, 8, 0.03) == pytest.approx(0.15)
    for _ in range(MIN_SAMPLES - 1):
        patience.record_late(1, 0.2)
    patience.record(1, 0.03)
    for _ in range(MIN_SAMPLES - 1):
        patience.record_late(1, 0.2)
        assert patience.limit_s(1) == pytest.approx(0.15), "not that many in a row"
    patience.record_late(1, 0.2)
    assert (patience.limit_s(1), patience.limit_s(8)) == (1.0, pytest.approx(0.15))


def test_a_late_step_counts_as_at_most_twice_its_limit():
    """Its answer may have arrived long before it was read."""
    patience = StepDeadline(0.1, 10.0, 5.0, median)
    assert after(patience, 1, 0.01) == 0.1
    for _ in range(MIN_SAMPLES):
        patience.record_late(1, 1.1)
    assert patience.limit_s(1) == 1.0


def test_a_size_that_is_always_late_gets_a_separate_limit():
    patience = StepDeadline(0.1, 10.0, 5.0, median, shares_sizes=True)
    assert after(patience, 1, 0.04) == pytest.approx(0.2)
    for _ in range(MIN_SAMPLES):
        assert patience.limit_s(64) == pytest.approx(0.2), "that of size 1"
        patience.record_late(64, 0.3)
        patience.record(1, 0.04)
    assert patience.limit_s(1) == pytest.approx(0.2)
    assert patience.limit_s(64) == pytest.approx(1.5)


def test_the_least_limit_does_not_exceed_the_full_one():
    deadline = StepDeadline(min_s=5.0, max_s=1.0, factor=20.0)
    assert after(deadline, 1, 0.01) == 1.0
