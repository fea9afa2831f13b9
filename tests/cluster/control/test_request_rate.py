"""Requests a second over all replicas."""

from cluster.control.request_rate import ArrivalRate
from tests.clock import Clock


def test_arrivals_of_ten_seconds_over_all_replicas():
    clock = Clock()
    rate = ArrivalRate(clock)
    rate.report("old", 1000)  # nobody knows when these came
    rate.report("new", 0)
    for second in range(1, 21):
        clock.now_s += 1
        rate.report("old", 1000 + 2 * second)
        rate.report("new", second)
    assert rate.per_s() == 3
    clock.now_s += 5
    assert rate.per_s() == 1.5
    clock.now_s += 5
    assert rate.per_s() == 0


def test_a_replica_that_starts_anew_under_the_same_name_is_not_negative():
    clock = Clock()
    rate = ArrivalRate(clock)
    rate.report("a", 50)
    rate.report("a", 3)
    rate.report("a", 13)
    assert rate.per_s() == 1
    rate.forget("a")
    rate.report("a", 99)
    assert rate.per_s() == 1
