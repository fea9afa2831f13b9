"""Points of charts from counts that were worked by hand."""

import pytest

from cluster.fleet_figures import (
    FIRST_TOKEN_BUCKETS_S,
    Load,
    Percentiles,
    ReplicaCounts,
    counted_between,
)
from cluster.fleet_history import KEPT_S, FleetHistory
from cluster.histogram import HistogramCounts

START_S = 1_000_000.0


def histogram(bucket, count):
    counts = [0] * (len(FIRST_TOKEN_BUCKETS_S) + 1)
    counts[bucket] = count
    return HistogramCounts(FIRST_TOKEN_BUCKETS_S, tuple(counts))


def counted(times=1):
    """Twice as much of everything, if `times` is 2."""
    return ReplicaCounts(
        num_requests=20 * times,
        num_generated_tokens=300 * times,
        num_drafts=50 * times,
        num_draft_tokens=150 * times,
        num_accepted_tokens=75 * times,
        drafted_by_position=(50 * times, 50 * times, 50 * times),
        accepted_by_position=(45 * times, 20 * times, 10 * times),
        first_token_s=histogram(3, 20 * times),
    )


def test_a_point_of_a_hand_worked_case():
    history = FleetHistory()
    load = Load(3, 2, 1, 0.25, num_draft_tokens=4, estimated_speedup=1.5)
    history.add(START_S, {"a": load}, {"a": counted()})
    assert history.since(0) == ()
    history.add(START_S + 10, {"a": load}, {"a": counted(2)})
    (point,) = history.since(0)
    assert (point.num_running, point.num_decoding, point.num_waiting) == (3, 2, 1)
    assert (point.requests_per_s, point.tokens_per_s) == (2.0, 30.0)
    assert (point.acceptance_rate, point.mean_acceptance_length) == (0.5, 2.5)
    assert point.acceptance_by_position == (0.9, 0.4, 0.2)
    assert point.first_token_s == Percentiles(*map(pytest.approx, (0.0375, 0.04875, 0.04975)))
    assert point.inter_token_s is None
    assert (point.num_draft_tokens, point.estimated_speedup) == (4.0, 1.5)


def test_replicas_are_added_up_and_the_busier_one_counts_for_more():
    history = FleetHistory()
    loads = {"a": Load(3, 3, 0, 0.5, 4, 2.0), "b": Load(1, 1, 0, 0.1, 0, 1.0), "c": Load()}
    history.add(START_S, loads, {"a": counted(), "b": ReplicaCounts()})
    history.add(START_S + 10, loads, {"a": counted(2), "b": counted()})
    (point,) = history.since(0)
    assert (point.num_replicas, point.num_decoding) == (3, 4)
    assert point.requests_per_s == 4.0
    assert point.kv_cache_usage == pytest.approx(0.2)
    assert point.estimated_speedup == 1.75


def test_a_replica_that_goes_or_comes_makes_no_rate_jump():
    before = {"gone": counted(7), "stays": counted()}
    assert counted_between(before, {"stays": counted(2)}) == counted()
    assert counted_between(before, {"stays": counted(), "new": counted()}) == counted()


def test_rates_go_by_ten_seconds_and_positions_by_a_minute():
    history = FleetHistory()
    for second in range(31):
        now = counted(2) if second >= 5 else counted()
        history.add(START_S + second, {"a": Load()}, {"a": now})
    rates = [point.requests_per_s for point in history.since(START_S + 9)]
    assert rates[:6] == [2.0, 2.0, 2.0, 2.0, 2.0, 0.0]
    last = history.since(START_S + 29)[-1]
    assert last.acceptance_rate is None
    assert last.acceptance_by_position == (0.9, 0.4, 0.2)


def test_no_more_than_a_point_a_second_and_a_quarter_of_an_hour():
    history = FleetHistory()
    for tick in range(4_000):
        history.add(START_S + tick / 2, {"a": Load()}, {"a": counted()})
    points = history.since(0)
    assert points[-1].time_s - points[0].time_s == pytest.approx(KEPT_S, abs=2)
    assert len(points) == pytest.approx(KEPT_S, abs=2)


def test_at_rest_a_rate_goes_by_the_time_since_the_point_before():
    history = FleetHistory()
    history.add(START_S, {"a": Load()}, {"a": counted()})
    history.add(START_S + 30, {"a": Load()}, {"a": counted()})
    history.add(START_S + 60, {"a": Load()}, {"a": counted(4)})
    assert history.since(START_S + 30)[-1].requests_per_s == 2.0


def test_a_clock_that_is_set_back_begins_anew():
    history = FleetHistory()
    history.add(START_S, {"a": Load()}, {"a": counted()})
    history.add(START_S + 5, {"a": Load()}, {"a": counted(2)})
    history.add(START_S - 100, {"a": Load()}, {"a": counted(2)})
    assert history.since(0) == ()
    history.add(START_S - 90, {"a": Load()}, {"a": counted(3)})
    assert history.since(0)[0].requests_per_s == 2.0
