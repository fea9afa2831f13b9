import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.histogram import HistogramCounts

BOUNDS = (1.0, 2.0, 4.0)


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ((0, 0, 0, 0), 0.5, None),
        ((4, 0, 0, 0), 0.5, 0.5),
        ((4, 0, 0, 0), 1.0, 1.0),
        ((0, 4, 0, 0), 0.5, 1.5),
        ((2, 2, 4, 0), 0.5, 2.0),
        ((2, 2, 4, 0), 0.75, 3.0),
        ((1, 0, 1, 0), 0.75, 3.0),
        ((0, 0, 0, 3), 0.5, 4.0),
        ((1, 0, 0, 9), 0.05, 0.5),
    ],
)
def test_quantiles_of_hand_worked_cases(counts, share, expected):
    assert HistogramCounts(BOUNDS, counts).quantile(share) == expected


COUNTS = st.lists(st.integers(0, 50), min_size=4, max_size=4).map(tuple)


@given(COUNTS, st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_has_no_smaller_quantile(counts, one, other):
    histogram = HistogramCounts(BOUNDS, counts)
    low, high = sorted((one, other))
    if any(counts):
        assert 0 <= histogram.quantile(low) <= histogram.quantile(high) <= BOUNDS[-1]


@given(COUNTS, COUNTS)
def test_what_was_added_can_be_taken_off(one, other):
    first, second = HistogramCounts(BOUNDS, one), HistogramCounts(BOUNDS, other)
    assert (first + second) - second == first
    assert HistogramCounts.empty(BOUNDS) + first == first
