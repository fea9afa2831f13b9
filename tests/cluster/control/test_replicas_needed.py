# Modules: cluster.control.plane, cluster.control.fleet_scaler
"""Replicas that an objective needs, as the ControlPlane counts them and Routers receive it."""

import asyncio
from dataclasses import replace

import pytest

from cluster.config.objective import Objective
from cluster.control.client import ControlClient
from cluster.control.plane import ControlPlane
from cluster.control.store import ControlStore
from specdec.types.reports.fleet import DRAINING, LOADING, ReplicaReport
from specdec.types.reports.service_curve import ServiceCurve
from specdec.types.reports.stats import Counts
from tests.cluster.admin_service import LocalHandle
from tests.cluster.control.conftest import CONFIGURED

CURVE = ServiceCurve((1, 4, 16), (100.0, 100.0, 25.0), 1000.0)
REPORT = ReplicaReport("a", is_ready=True, service_curve=CURVE)


@pytest.fixture
def plane(tmp_path, clock):
    store = ControlStore(tmp_path, "tiny")
    return ControlPlane(CONFIGURED, store, objective=Objective(2.0, 0.04), clock=clock)


def counts(num_requests):
    """Return the counters of requests with 100 tokens of prompt and output each."""
    return Counts(
        num_requests=num_requests,
        num_prompt_tokens=100 * num_requests,
        num_generated_tokens=100 * num_requests,
        ended={"stop": num_requests},
    )


async def serve(plane, clock, requests_per_s, seconds, **changes):
    """Serve by two replicas; return the number of the last report."""
    for _ in range(seconds):
        clock.now_s += 1
        for name in "ab":
            number = round(requests_per_s / 2 * clock.now_s)
            report = replace(REPORT, replica_id=name, counts=counts(number), **changes)
            needed = await plane.report(report, clock.now_s)
    return needed


async def test_the_number_follows_the_requests_of_all_replicas(plane, clock):
    assert await serve(plane, clock, 20, 9) is None
    assert await serve(plane, clock, 20, 60) == 8
    assert (await plane.fleet()).replicas_needed == 8


async def test_a_replica_that_drains_does_not_count(plane, clock):
    """Its requests are no load of the others, and it is none of the replicas."""
    await serve(plane, clock, 0.1, 60)
    ending = replace(REPORT, replica_id="c", is_ready=False, reason=DRAINING, num_running=500)
    for _ in range(10):
        clock.now_s += 1
        await plane.report(ending, clock.now_s)
    assert (await plane.fleet()).replicas_needed == 2


async def test_a_replica_that_starts_clears_no_queue(plane, clock):
    """Otherwise each one that is ordered would make the next order larger."""
    queue = {"num_running": 16, "num_waiting": 100}
    before = await serve(plane, clock, 20, 60, **queue)
    for each in range(20):
        starting = replace(REPORT, is_ready=False, reason=LOADING, service_curve=None)
        await plane.report(replace(starting, replica_id=f"c{each}"), clock.now_s)
    assert await serve(plane, clock, 20, 10, **queue) == before


async def test_a_silent_replica_lowers_no_number(plane, clock):
    """Its requests count until it is forgotten."""
    await serve(plane, clock, 20, 60)
    for _ in range(80):  # "b" is silent, with its requests
        clock.now_s += 1
        report = replace(REPORT, counts=counts(round(10 * clock.now_s)))
        assert await plane.report(report, clock.now_s) in (8, None)


async def test_without_an_objective_it_is_unknown(make, clock):
    plane = make()
    assert await serve(plane, clock, 20, 60) is None
    assert (await plane.fleet()).replicas_needed is None


async def test_a_router_has_the_number_of_its_last_report(plane, clock):
    await serve(plane, clock, 20, 60)
    handle = LocalHandle(plane)
    link = ControlClient(handle, None, lambda: REPORT)
    assert link.replicas_needed is None
    await link.status()
    assert link.replicas_needed == 8


async def test_a_failed_report_leaves_no_number(plane, clock, monkeypatch):
    await serve(plane, clock, 20, 60)
    handle, failed = LocalHandle(plane), asyncio.Event()

    def fail(*_):
        failed.set()
        raise ValueError("a defect")

    async def apply(state):
        pass

    link = ControlClient(handle, apply, lambda: REPORT)
    await link.status()
    monkeypatch.setattr(link, "_make_report", fail)
    link.start()
    await failed.wait()
    await asyncio.sleep(0)
    assert link.replicas_needed is None
    await link.close("a", has_failed=False)
