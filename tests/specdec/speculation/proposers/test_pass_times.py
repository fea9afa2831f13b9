"""Tests of the seconds of passes by their number of tokens."""

import pytest

from specdec.speculation.proposers.pass_times import PassTimes
from specdec.types.draft_messages import DraftPass


def observed(seconds_of, sizes):
    times = PassTimes()
    for num_tokens in sizes:
        times.observe(DraftPass(num_tokens, seconds_of(num_tokens)))
    return times


def test_nothing_is_known_before_the_first_pass():
    assert (PassTimes().seconds(1), PassTimes().max_tokens) == (None, None)


def test_one_size_is_the_time_of_all_and_of_passes_twice_as_large():
    times = observed(lambda _: 0.5, [4])
    assert (times.seconds(1), times.seconds(8), times.max_tokens) == (0.5, 0.5, 8)


def test_a_step_between_two_sizes_is_no_slope_beyond_them():
    """A single token is a product with a vector, and cheap; others share another kernel."""
    times = observed(lambda count: 0.006 if count == 1 else 0.019 + 0.001 * count, [1, 2, 4, 8])
    assert times.seconds(1) == pytest.approx(0.006)
    assert times.seconds(3) == pytest.approx(0.022)
    assert times.seconds(16) == pytest.approx(0.035)


@pytest.mark.parametrize("num_tokens", [1, 3, 12, 40])
def test_a_line_is_found_beyond_what_was_measured(num_tokens):
    times = observed(lambda count: 0.01 + 0.0005 * count, [4, 8, 16, 30])
    assert times.seconds(num_tokens) == pytest.approx(0.01 + 0.0005 * num_tokens)


def test_a_smaller_pass_takes_its_share_at_least():
    times = observed({8: 0.1, 16: 0.3}.get, [8, 16])
    assert times.seconds(2) == pytest.approx(0.1 * 2 / 8)


def test_a_pass_of_more_tokens_is_never_expected_to_be_shorter():
    times = observed(lambda count: 1.0 / count, [2, 4, 16])
    assert times.seconds(100) == times.seconds(2) == 0.5


def test_one_slow_pass_among_many_does_not_count():
    times = observed(lambda _: 0.01, [4] * 5)
    times.observe(DraftPass(4, 9.0))
    assert times.seconds(4) == 0.01


def test_a_size_that_no_pass_had_for_long_is_tried_again():
    times = observed({2: 0.01, 32: 5.0}.get, [32, 2])
    assert times.seconds(16) > 1
    for _ in range(1000):
        times.observe(DraftPass(2, 0.01))
    assert times.max_tokens == 4
    assert times.seconds(4) == 0.01
