"""Replicas that a pool needs, from the counters and curves of its endpoints."""

from dataclasses import replace

from cluster.api.endpoint_picker.pool import Pool
from cluster.api.endpoint_picker.pool_scaler import PoolScaler
from cluster.api.endpoint_picker.reports import EndpointReport
from cluster.config.objective import Objective
from cluster.control.replica_scaler import HOLD_S, LEAST_S, Totals
from specdec.types.reports.service_curve import ServiceCurve
from tests.clock import Clock

CURVE = ServiceCurve((1, 4, 16), (100.0, 100.0, 25.0), 1000.0)
STEP_S = 5


class Fleet:
    """A pool of endpoints "a", "b", ... that report the same load each, and its scaler."""

    def __init__(self, num_endpoints, curve=CURVE):
        self.clock = Clock()
        self.pool = Pool(self.clock)
        self.scaler = PoolScaler(self.pool, Objective(2.0, 0.04))
        self.totals = Totals(1e6, 1e8, 1e8, 1e6)  # from before
        self.report = EndpointReport(curve=curve)
        self.set_size(num_endpoints)

    def set_size(self, num_endpoints):
        self.pool.set_addresses("abcdefghijkl"[:num_endpoints])

    def count(self):
        for each in self.pool.endpoints:
            report = replace(self.report, totals=self.totals)
            each.apply(report, is_ready=True, now_s=self.clock())
        self.scaler.count()
        return self.scaler.number

    def serve(self, requests_per_s, seconds):
        """Let each endpoint serve; return the last number."""
        for _ in range(round(seconds / STEP_S)):
            self.clock.now_s += STEP_S
            count = requests_per_s * STEP_S
            self.totals = self.totals.plus(Totals(count, 100 * count, 100 * count, count))
            self.count()
        return self.scaler.number


def test_requests_of_all_endpoints_count():
    fleet = Fleet(2)
    assert fleet.count() is None
    assert fleet.serve(0, LEAST_S) == 2, "those that run, as what was counted before is old"
    assert fleet.serve(10, 120) == 8  # 20 requests a second
    fleet.set_size(4)
    assert fleet.serve(5, 120) == 8, "the counters of the new ones begin"
    assert fleet.serve(5, 3 * HOLD_S) == 8


def test_endpoints_that_leave_take_no_requests_away():
    fleet = Fleet(4)
    fleet.count()
    fleet.serve(5, 120)
    fleet.set_size(2)
    assert fleet.serve(10, 3 * HOLD_S) == 8


def test_requests_that_the_picker_refuses_are_demand():
    fleet = Fleet(2)
    fleet.count()
    fleet.serve(10, 60)
    before = fleet.serve(10, 60)
    for _ in range(24):
        fleet.pool.refusals[429] += 20 * STEP_S
        fleet.serve(10, STEP_S)
    assert fleet.scaler.number == 2 * before


def test_a_server_that_counts_no_arrivals_counts_as_one_replica(caplog):
    fleet = Fleet(4)
    fleet.count()
    assert fleet.serve(5, 120) == 8
    silent = next(iter(fleet.pool.endpoints))
    silent.apply(EndpointReport(), is_ready=True, now_s=fleet.clock())
    for _ in range(100):
        fleet.clock.now_s += STEP_S
        fleet.totals = fleet.totals.plus(Totals(25, 2500, 2500, 25))
        for each in fleet.pool.endpoints:
            report = fleet.report if each is silent else replace(fleet.report, totals=fleet.totals)
            each.apply(report, is_ready=True, now_s=fleet.clock())
        fleet.scaler.count()
    assert fleet.scaler.number == 8, "15 requests a second beside it, and what is spare"
    assert fleet.scaler.unread == {"a"}
    [record] = caplog.records
    assert record.message == "a reports no arrivals: it counts as a full replica"


def test_a_pool_without_arrivals_has_no_number_and_one_warning(caplog):
    fleet = Fleet(4)
    fleet.report = EndpointReport()
    for each in fleet.pool.endpoints:
        each.apply(fleet.report, is_ready=True, now_s=fleet.clock())
    for _ in range(2):
        fleet.scaler.count()
    assert (fleet.scaler.number, len(fleet.scaler.unread)) == (None, 4)
    [record] = caplog.records
    assert "no endpoint reports arrivals and expected tokens per second" in record.message


def test_open_requests_count():
    fleet = Fleet(2)
    fleet.count()
    fleet.serve(1, 60)
    fleet.report = replace(fleet.report, num_running=100, num_waiting=100)
    assert fleet.serve(1, STEP_S) == 3, "both are full"


def test_what_is_served_between_two_scrapes_counts_however_long_they_are_apart():
    fleet = Fleet(2)
    fleet.count()
    fleet.serve(1, 60)
    for each in fleet.pool.endpoints:
        for _ in range(5):
            each.fail_scrape(is_refused=False)
    fleet.clock.now_s += STEP_S
    fleet.scaler.count()
    fleet.totals = fleet.totals.plus(Totals(900, 90_000, 90_000, 900))
    assert fleet.serve(10, STEP_S) == 12  # 28.9 requests a second


def test_failed_scrapes_remove_nothing_and_end_in_an_unknown_number():
    fleet = Fleet(8)
    fleet.count()
    assert fleet.serve(2.5, 400) == 8
    found = []
    for _ in range(120):
        fleet.clock.now_s += STEP_S
        for each in fleet.pool.endpoints:
            each.fail_scrape(is_refused=False)
        fleet.scaler.count()
        found.append(fleet.scaler.number)
    assert set(found[: round(HOLD_S / STEP_S)]) == {8}
    assert set(found[-40:]) == {None}
    assert fleet.serve(2.5, LEAST_S + STEP_S) == 8


def test_an_endpoint_that_hangs_stops_no_scaling(caplog):
    fleet = Fleet(8)
    fleet.count()
    assert fleet.serve(2.5, 400) == 8
    hanging = fleet.pool.get("a")

    def serve(requests_per_s, seconds):
        for _ in range(round(seconds / STEP_S)):
            fleet.clock.now_s += STEP_S
            count = requests_per_s * STEP_S
            fleet.totals = fleet.totals.plus(Totals(count, 100 * count, 100 * count, count))
            report = replace(fleet.report, totals=fleet.totals)
            for each in fleet.pool.endpoints:
                if each is hanging:
                    each.fail_scrape(is_refused=False)
                else:
                    each.apply(report, is_ready=True, now_s=fleet.clock())
            fleet.scaler.count()
            yield fleet.scaler.number

    assert set(serve(20 / 7, 2 * HOLD_S)) == {8, 9}, "as many beside it"
    assert [*serve(40 / 7, 120)][-1] == 17
    assert [*serve(5 / 7, 3 * HOLD_S)][-1] == 4
    assert fleet.scaler.unread == {"a"}
    [record] = caplog.records
    assert record.message == "a has not reported for 90 s: it counts as a full replica"


def test_endpoints_that_start_are_not_removed_either():
    fleet = Fleet(2)
    fleet.count()
    fleet.serve(1, LEAST_S - STEP_S)
    fleet.pool.set_addresses("abcd")
    fleet.clock.now_s += STEP_S
    fleet.scaler.count()
    assert fleet.scaler.number == 4


def test_without_a_curve_the_number_is_unknown_which_is_logged_once(caplog):
    fleet = Fleet(2, curve=None)
    assert fleet.count() is None
    assert fleet.serve(10, 60) is None
    [record] = caplog.records
    assert "--slo" in record.message
