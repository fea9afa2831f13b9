import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.client import Counts, HistogramCounts
from specdec.types.reports.stats import SpeculationStats

BOUNDS = (1.0, 2.0, 4.0)
COUNTS = st.lists(st.integers(0, 50), min_size=4, max_size=4).map(tuple)


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
        ((0, 3, 0, 0), 0.0, 0.0),
    ],
)
def test_quantiles_of_hand_worked_cases(counts, share, expected):
    assert HistogramCounts(BOUNDS, counts, 0.0).quantile(share) == expected


@given(COUNTS, st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_has_no_smaller_quantile(counts, one, other):
    histogram = HistogramCounts(BOUNDS, counts, 0.0)
    low, high = sorted((one, other))
    if any(counts):
        assert 0 <= histogram.quantile(low) <= histogram.quantile(high) <= BOUNDS[-1]


def counted(positions, histogram, number):
    return Counts(
        num_requests=number,
        num_prompt_tokens=number + 1,
        num_generated_tokens=number + 2,
        num_steps=number + 3,
        speculation=SpeculationStats(number, 2 * number, 3 * number),
        accepted_by_position=positions,
        drafted_by_position=positions,
        decisions={"goodput": number},
        histograms={"latency": HistogramCounts(BOUNDS, histogram, 0.0)},
    )


POSITIONS = st.lists(st.integers(0, 9), min_size=2, max_size=2).map(tuple)


@given(st.builds(counted, POSITIONS, COUNTS, st.integers(0, 99)), st.integers(0, 99))
def test_minus_reverses_plus(before, number):
    new = counted((1, 2, 3), (0, 1, 2, 3), number)
    assert before.plus(new).minus(before) == new
    assert new.minus(Counts()) == new
