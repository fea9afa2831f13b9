"""Delays between restarts."""

from cluster.workers.groups.backoff import Backoff
from tests.clock import Clock


def test_the_first_restart_is_immediate_and_later_delays_double_up_to_a_limit():
    backoff = Backoff(Clock(), base_s=1.0, limit_s=10.0)
    assert [backoff.delay_s() for _ in range(7)] == [0, 1, 2, 4, 8, 10, 10]


def test_the_time_of_a_slow_start_does_not_count_as_running():
    clock = Clock()
    backoff = Backoff(clock, forget_after_s=60.0)
    for failures in range(1, 8):
        clock.now_s += 300  # a slow load that fails
        backoff.delay_s()
        assert backoff.num_failures == failures


def test_a_minute_of_running_resets_the_delay():
    clock = Clock()
    backoff = Backoff(clock, forget_after_s=60.0)
    for _ in range(4):
        backoff.delay_s()
    backoff.started()
    clock.now_s += 59
    backoff.delay_s()
    assert backoff.num_failures == 5
    backoff.started()
    clock.now_s += 61
    assert backoff.delay_s() == 0
    assert backoff.num_failures == 1
