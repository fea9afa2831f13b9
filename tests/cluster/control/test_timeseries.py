"""Points of charts and request rates, from counts that were worked by hand."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from cluster.control.timeseries import (
    KEPT_S,
    FleetHistory,
    FleetMemory,
    Percentiles,
    RequestRate,
)
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
from specdec.types.reports.fleet import MemoryUse
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
        num_steps=40 * times,
        num_drafted_steps=30 * times,
        spent_s=2.0 * times,
        undrafted_s=3.0 * times,
        failed={
            "RESOURCE_EXHAUSTED": 4 * times,
            "INTERNAL": 1 * times,
            "UNAVAILABLE": 2 * times,
            "INVALID_ARGUMENT": 5 * times,
            "NOT_FOUND": 1 * times,
            "CANCELLED": 9 * times,
        },
        speculation=SpeculationStats(50 * times, 150 * times, 75 * times),
        reached_by_position=(50 * times, 40 * times, 20 * times),
        accepted_by_position=(45 * times, 20 * times, 10 * times),
        histograms={FIRST_TOKEN: HistogramCounts((0.1, 0.2), (0, 20 * times, 0), 0.0)},
    )


def fleet(after_s, requests_per_s=0.0, totals=None, **counts_by_replica):
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
                counts=counts,
            ),
            uptime_s=after_s,
            age_s=0.0,
        )
        for name, counts in counts_by_replica.items()
    )
    at = datetime.fromtimestamp(START_S + after_s, UTC)
    status = ServiceStatus(replicas, STATE, num_lost_replicas=1)
    return FleetStatistics(at, status, requests_per_s, totals or Counts())


def test_a_point_of_a_hand_worked_case():
    history = FleetHistory()
    history.add(fleet(0, a2=counted()))
    assert history.since(0) == ()
    totals = Counts(num_target_restarts=2, num_draft_restarts=3)
    history.add(fleet(10, requests_per_s=2.0, totals=totals, a2=counted(2)))
    (point,) = history.since(0)
    assert point.time_s == START_S + 10
    assert (point.num_running, point.num_decoding, point.num_waiting) == (3, 2, 1)
    assert (point.requests_per_s, point.tokens_per_s) == (2.0, 30.0)
    assert (point.arrivals_per_s, point.generated_per_s) == (2.0, 30.0), "since the point before"
    assert (point.num_steps, point.num_drafted_steps, point.speedup) == (40, 30, 1.5)
    assert (point.acceptance_rate, point.mean_acceptance_length) == (0.5, 2.5)
    assert point.mean_draft_length == 3.0
    assert (point.reached_by_position, point.accepted_by_position) == ((50, 40, 20), (45, 20, 10))
    assert (point.num_errors, point.num_rejected, point.num_client_errors) == (3, 4, 6)
    assert point.num_restarts == 2 + 3 + 1, "of both models, and a lost replica"
    assert point.first_token_s == Percentiles(*map(pytest.approx, (0.15, 0.195, 0.199)))
    assert point.inter_token_s is None
    assert point.memory is None


def test_replicas_are_summed_and_the_speedup_is_weighted_by_time():
    history = FleetHistory()
    history.add(fleet(0, a3=counted(), b1=Counts(), c0=Counts()))
    other = replace(counted(), spent_s=6.0, undrafted_s=6.0)
    history.add(fleet(10, a3=counted(2), b1=other, c0=Counts()))
    (point,) = history.since(0)
    assert point.num_decoding == 4
    assert point.tokens_per_s == 60.0
    assert point.kv_cache_usage == pytest.approx(0.4 / 3)
    assert point.speedup == (3.0 + 6.0) / (2.0 + 6.0)


def test_the_rates_of_charts_do_not_count_from_an_idle_time_long_ago():
    history = FleetHistory()
    for after_s, num_requests in ((0, 0), (30, 0), (60, 10), (61, 20), (62, 30)):
        counts = Counts(num_requests=num_requests)
        at = fleet(after_s, a1=counts)
        if num_requests == 0:
            [status] = at.status.replicas
            idle = replace(status.report, num_running=0, num_waiting=0)
            at = replace(at, status=replace(at.status, replicas=(replace(status, report=idle),)))
        history.add(at)
    assert [each.arrivals_per_s for each in history.since(0)] == [0.0, 10 / 30, 10.0, 10.0]


def test_memory_is_summed_and_the_fullest_node_counts():
    history = FleetHistory()
    history.add(fleet(0, a0=Counts()))
    uses = MemoryUse(10, 100, 30, 80, 20), MemoryUse(5, 200, 180, 80, 79)
    both = fleet(1, a0=Counts(), b0=Counts(), c0=Counts())
    a, b, c = both.status.replicas
    known = [
        replace(each, report=replace(each.report, memory=use))
        for each, use in zip((a, b), uses, strict=True)
    ]
    history.add(replace(both, status=replace(both.status, replicas=(*known, c))))
    assert history.since(0)[-1].memory == FleetMemory(15, 0.9, 160, 99)


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
    points = history.since(START_S + 9)
    assert [point.tokens_per_s for point in points][:6] == [30.0, 30.0, 30.0, 30.0, 30.0, 0.0]
    edges = [(point.time_s - START_S, point.generated_per_s) for point in history.since(0)]
    assert [at for at, rate in edges if rate] == [5, 6, 7], "three seconds: no slope in the chart"
    assert {rate for _, rate in edges if rate} == {100.0}
    assert [point.num_errors for point in points] == [3] * len(points), "a minute"
    last = history.since(START_S + 29)[-1]
    assert (last.acceptance_rate, last.mean_acceptance_length) == (None, None)
    assert (last.mean_draft_length, last.speedup, last.num_steps) == (None, None, 0)
    assert last.accepted_by_position == (45, 20, 10)


def test_traffic_that_begins_and_ends_is_no_slope():
    """Busy from second 3 to 10: with 30 tokens in each of them."""
    history = FleetHistory()
    for second in range(16):
        counts = Counts(num_generated_tokens=30 * min(7, max(0, second - 3)))
        now = fleet(second, a1=counts)
        if not 3 < second <= 10:
            (status,) = now.status.replicas
            idle = replace(status.report, num_running=0, num_waiting=0)
            idle_status = replace(now.status, replicas=(replace(status, report=idle),))
            now = replace(now, status=idle_status)
        history.add(now)
    rates = [point.generated_per_s for point in history.since(0)]
    assert rates == [0, 0, 0, *[30] * 7, 0, 0, 0, 0, 0]


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
    clock.now_s += 5
    assert rate.per_s() == 2
    rate.forget("a")
    rate.report("a", 99)
    assert rate.per_s() == 2
