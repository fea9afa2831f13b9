"""The load that a replica reports to the autoscaler."""

import pytest

from cluster.replica.report import ReplicaLoad
from tests.clock import Clock


def load_at(rate, num_open, capacity):
    clock = Clock()
    load, reported = ReplicaLoad(32, clock), 0.0
    for second in range(30):
        reported = load.requests(num_open, rate * second, capacity)
        clock.now_s += 1
    return reported


@pytest.mark.parametrize(
    ("rate", "num_open", "capacity", "expected"),
    [
        (500, 4, 1000.0, 16),
        (500, 20, 1000.0, 20),
        (500, 4, None, 4),
        (0, 4, 1000.0, 4),
        (1000, 90, 1000.0, 90),
    ],
)
def test_open_requests_or_the_share_of_its_capacity(rate, num_open, capacity, expected):
    assert load_at(rate, num_open, capacity) == pytest.approx(expected)


def test_the_rate_is_that_of_the_last_ten_seconds():
    clock = Clock()
    load = ReplicaLoad(32, clock)
    assert load.requests(0, 0, 100.0) == 0, "one sample has no rate"
    clock.now_s += 1
    load.requests(0, 100, 100.0)
    for _ in range(12):
        clock.now_s += 1
        reported = load.requests(0, 100, 100.0)
    assert reported == 0
