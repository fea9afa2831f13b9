"""Tests of the statistics of benchmarks.off_cost."""

import numpy as np
import pytest

from benchmarks.off_cost import OFF, WITHOUT, bars, halves, lower_bound, make_cases, shares
from benchmarks.workloads import Measurement, StreamRecord


def rate(tokens_per_s):
    return Measurement(100 / tokens_per_s, (StreamRecord((1,) * 100, (0.1,)),))


def test_a_share_is_the_median_of_the_ratios_within_rounds():
    measured = {}
    for count in (1, 8, 32):
        measured[f"{OFF} {count}"] = [rate(99), rate(45), rate(200)]
        measured[f"{WITHOUT} {count}"] = [rate(100), rate(50), rate(100)]
    first = shares(measured)[0]
    assert first.of_each_round == pytest.approx((0.99, 0.9, 2.0))
    assert first.median == pytest.approx(0.99)
    assert first.lower_bound == pytest.approx(0.9)
    assert [bar.is_met for bar in bars([first])] == [True, False]


def test_the_bound_covers_the_median_at_the_stated_confidence():
    """Of 200 samples of 15, at least 0.95 - 4 standard deviations: false alarm odds 1 in 30,000."""
    random = np.random.default_rng(1)
    bounds = [lower_bound(random.normal(1.0, 0.05, 15).tolist(), seed) for seed in range(200)]
    assert sum(bound <= 1.0 for bound in bounds) >= 0.89 * 200
    assert np.mean(bounds) > 0.95  # and is not just far below


@pytest.mark.parametrize(("count", "each"), [(10, (5, 5)), (9, (5, 4)), (1, (1, 0))])
def test_rounds_alternate_between_both_orders(count, each):
    assert halves(count) == each


def test_both_services_get_the_same_prompts_and_only_one_opts_out():
    off, without = make_cases([(1,), (2,)], 16)[2:4]
    assert off.workloads[0].prompts == without.workloads[0].prompts == ((1,), (2,)) * 8
    assert off.workloads[0].num_streams == without.workloads[0].num_streams == 8
    assert [off.workloads[0].method, without.workloads[0].method] == ["as steered", "none"]
