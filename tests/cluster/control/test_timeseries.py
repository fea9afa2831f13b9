"""Points of charts and request rates, from counts that were worked by hand."""

from datetime import UTC, datetime

import pytest

from cluster.control.timeseries import KEPT_S, FleetHistory, Percentiles, RequestRate
from specdec.client import (
    Counts,
    FleetStatistics,
    HistogramCounts,
    ReplicaReport,
    ReplicaStatus,
    ServiceStatus,
    SpeculationState,
)
from specdec.engine.metrics.metrics import FIRST_TOKEN
from specdec.types.control import SpeculationControl
from specdec.types.reports.stats import SpeculationStats
from tests.clock import Clock

START_S = 1_000_000.0
CONTROL = SpeculationControl("auto", threshold=8, num_speculative_tokens=4)
STATE = SpeculationState(CONTROL, CONTROL, CONTROL, (), 0, None, "", "")


def counted(times=1):
    """Return counts, all multiplied by `times`."""
    return Counts(
        num_requests=20 * times,
        num_generated_tokens=300 * times,
        speculation=SpeculationStats(50 * times, 150 * times, 75 * times),
        drafted_by_position=(50 * times, 50 * times, 50 * times),
        accepted_by_position=(45 * times, 20 * times, 10 * times),
        histograms={FIRST_TOKEN: HistogramCounts((0.1, 0.2), (0, 20 * times, 0), 0.0)},
    )


def fleet(after_s, requests_per_s=0.0, **counts_by_replica):
    """Return the fleet `after_s` after the start; a replica decodes the number in its name."""
    replicas = tuple(
        ReplicaStatus(
            ReplicaReport(
                name,
                is_ready=True,
                num_running=1 + int(name[-1]),
                num_decoding=int(name[-1]),
                num_waiting=1,
                kv_cache_usage=int(name[-1]) / 10,
                num_chosen_tokens=4,
                estimated_speedup=1.0 + int(name[-1]),
                counts=counts,
            ),
            uptime_s=after_s,
            age_s=0.0,
        )
        for name, counts in counts_by_replica.items()
    )
    at = datetime.fromtimestamp(START_S + after_s, UTC)
    return FleetStatistics(at, ServiceStatus(replicas, STATE, 0), requests_per_s, Counts())


def test_a_point_of_a_hand_worked_case():
    history = FleetHistory()
    history.add(fleet(0, a2=counted()))
    assert history.since(0) == ()
    history.add(fleet(10, requests_per_s=2.0, a2=counted(2)))
    (point,) = history.since(0)
    assert point.time_s == START_S + 10
    assert (point.num_running, point.num_decoding, point.num_waiting) == (3, 2, 1)
    assert (point.requests_per_s, point.tokens_per_s) == (2.0, 30.0)
    assert (point.acceptance_rate, point.mean_acceptance_length) == (0.5, 2.5)
    assert point.acceptance_by_position == (0.9, 0.4, 0.2)
    assert point.first_token_s == Percentiles(*map(pytest.approx, (0.15, 0.195, 0.199)))
    assert point.inter_token_s is None
    assert (point.num_chosen_tokens, point.estimated_speedup) == (4.0, 3.0)


def test_replicas_are_summed_and_the_speedup_is_weighted_by_load():
    history = FleetHistory()
    history.add(fleet(0, a3=counted(), b1=Counts(), c0=Counts()))
    history.add(fleet(10, a3=counted(2), b1=counted(), c0=Counts()))
    (point,) = history.since(0)
    assert (point.num_replicas, point.num_decoding) == (3, 4)
    assert point.tokens_per_s == 60.0
    assert point.kv_cache_usage == pytest.approx(0.4 / 3)
    assert point.estimated_speedup == (3 * 4.0 + 1 * 2.0) / 4, "c decodes nothing"


def test_replicas_that_join_leave_or_return_cause_no_jump():
    history = FleetHistory()
    history.add(fleet(0, stays1=counted(), gone1=counted(7)))
    history.add(fleet(10, stays1=counted()))
    history.add(fleet(20, stays1=counted(), old1=counted(900)))
    history.add(fleet(30, stays1=counted(), old1=counted(901)))
    assert [point.tokens_per_s for point in history.since(0)] == [0.0, 0.0, 30.0]


def test_rates_are_over_ten_seconds_and_positions_over_a_minute():
    history = FleetHistory()
    for second in range(31):
        history.add(fleet(second, a1=counted(2 if second >= 5 else 1)))
    rates = [point.tokens_per_s for point in history.since(START_S + 9)]
    assert rates[:6] == [30.0, 30.0, 30.0, 30.0, 30.0, 0.0]
    last = history.since(START_S + 29)[-1]
    assert (last.acceptance_rate, last.mean_acceptance_length) == (None, None)
    assert last.acceptance_by_position == (0.9, 0.4, 0.2)


def test_there_is_a_point_per_second_for_15_minutes():
    history = FleetHistory()
    for tick in range(4_000):
        if history.is_due(START_S + tick / 2):
            history.add(fleet(tick / 2, a1=counted()))
    points = history.since(0)
    assert points[-1].time_s - points[0].time_s == pytest.approx(KEPT_S, abs=2)
    assert len(points) == pytest.approx(KEPT_S, abs=2)
    assert history.since(points[-2].time_s) == points[-1:]


def test_an_idle_fleet_has_rates_since_the_previous_point():
    history = FleetHistory()
    for minute, times in enumerate((1, 1, 4)):
        history.add(fleet(30 * minute, a1=counted(times)))
    assert [point.tokens_per_s for point in history.since(0)] == [0.0, 30.0]


def test_a_clock_that_is_set_back_restarts_the_history():
    history = FleetHistory()
    history.add(fleet(0, a1=counted()))
    history.add(fleet(5, a1=counted(2)))
    assert history.is_due(START_S - 100)
    history.add(fleet(-100, a1=counted(2)))
    assert history.since(0) == ()
    history.add(fleet(-90, a1=counted(3)))
    assert [point.tokens_per_s for point in history.since(0)] == [30.0]


def test_requests_of_ten_seconds_over_all_replicas_are_counted():
    clock = Clock()
    rate = RequestRate(clock)
    rate.report("old", 1000)  # at unknown times
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


def test_a_counter_that_restarts_is_not_negative():
    clock = Clock()
    rate = RequestRate(clock)
    rate.report("a", 50)
    rate.report("a", 3)
    rate.report("a", 13)
    assert rate.per_s() == 1
    rate.forget("a")
    rate.report("a", 99)
    assert rate.per_s() == 1
