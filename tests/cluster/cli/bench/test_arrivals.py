"""Arrival times: their distribution and reproducibility."""

from itertools import pairwise

import pytest
from scipy import stats

from cluster.cli.bench.dataset import arrival_times

COUNT = 20_000
# A correct generator fails a test of this significance for one seed in a million; the seed is
# fixed, so a failure means that the code changed. The three cases
# together have false-alarm odds of 3 in a million.
SIGNIFICANCE = 1e-6


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_gamma_distribution_of_the_rate(burstiness):
    rate = 5.0
    times = arrival_times(COUNT, rate, burstiness, seed=7)
    gaps = [times[0], *(after - before for before, after in pairwise(times))]
    expected = stats.gamma(burstiness, scale=1 / (rate * burstiness))
    assert stats.kstest(gaps, expected.cdf).pvalue > SIGNIFICANCE
    if burstiness != 1.0:  # the test has the power to detect another shape
        assert stats.kstest(gaps, stats.expon(scale=1 / rate).cdf).pvalue < SIGNIFICANCE


def test_the_variance_of_poisson_counts_equals_their_mean():
    """Counts in windows have variance = mean; 4 windows a request, sd of the ratio about 0.02."""
    times = arrival_times(COUNT, 10.0, 1.0, seed=3)
    windows = [0] * (int(times[-1] / 0.4) + 1)
    for each in times:
        windows[int(each / 0.4)] += 1
    assert stats.tvar(windows) / stats.tmean(windows) == pytest.approx(1, abs=0.12)  # 6 sd


def test_times_ascend_and_depend_on_the_seed_alone():
    times = arrival_times(50, 2.0, 1.0, seed=1)
    assert times == sorted(times)
    assert times == arrival_times(50, 2.0, 1.0, seed=1)
    assert times != arrival_times(50, 2.0, 1.0, seed=2)
    assert arrival_times(50, 4.0, 1.0, seed=1) == pytest.approx([each / 2 for each in times])
