"""A service curve between, below and beyond its numbers of streams."""

import pytest

from specdec.types.errors import InvalidValueError
from specdec.types.reports.service_curve import ServiceCurve

CURVE = ServiceCurve((1, 4, 16), (50.0, 40.0, 25.0), 1000.0)


@pytest.mark.parametrize(
    ("num_streams", "token_s"),
    [(0, 0.02), (1, 0.02), (2.5, 0.0225), (4, 0.025), (10, 0.0325), (16, 0.04), (32, 0.08)],
)
def test_seconds_are_linear_and_proportional_beyond_the_largest_batch(num_streams, token_s):
    assert CURVE.token_s(num_streams) == pytest.approx(token_s)


@pytest.mark.parametrize(("num_streams", "token_s"), [(0, 0.02), (0.5, 0.02), (1, 0.02), (3, 0.06)])
def test_a_batch_of_one(num_streams, token_s):
    curve = ServiceCurve((1,), (50.0,), 1000.0)
    assert curve.token_s(num_streams) == pytest.approx(token_s)


def test_a_batch_has_the_rates_of_all_its_streams():
    assert CURVE.batch_tokens_per_s(4) == pytest.approx(160)
    assert CURVE.batch_tokens_per_s(99) == pytest.approx(400)
    assert ServiceCurve((1,), (50.0,), 1.0).batch_tokens_per_s(3) == pytest.approx(50)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        (((), (), 1.0), "num_streams"),
        (((2, 4), (1.0, 1.0), 1.0), "num_streams"),
        (((1, 1), (1.0, 1.0), 1.0), "num_streams"),
        (((1, 2), (1.0,), 1.0), "stream_tokens_per_s"),
        (((1,), (0.0,), 1.0), "stream_tokens_per_s"),
        (((1,), (float("nan"),), 1.0), "stream_tokens_per_s"),
        (((1,), (1e-300,), 1.0), "stream_tokens_per_s"),
        (((1,), (1.0,), float("inf")), "prompt_tokens_per_s"),
        (((1,), (1.0,), 1e-300), "prompt_tokens_per_s"),
    ],
)
def test_what_is_no_curve_is_refused(values, name):
    with pytest.raises(InvalidValueError, match=f"^{name} is"):
        ServiceCurve(*values)
