"""The event stream of the dashboard."""

import asyncio
import json

import pytest

from cluster.api.dashboard.routes import SharedMoments, fleet_events
from cluster.config.objective import Objective
from cluster.control.client import MAX_WATCHERS, ControlClient
from cluster.control.plane import ControlPlane
from cluster.control.store import ControlStore
from specdec.client import ReplicaReport
from specdec.types.control import SpeculationControl
from specdec.types.errors import NotReadyError, OverloadedError
from specdec.types.reports.service_curve import ServiceCurve
from tests.clock import Clock
from tests.cluster.admin_service import LocalHandle, operator_service

CONFIGURED = SpeculationControl("auto", threshold=8, num_speculative_tokens=3)
CURVE = ServiceCurve((1, 8), (100.0, 50.0), 1000.0)
REPORT = ReplicaReport("a", is_ready=True, num_decoding=2, service_curve=CURVE)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
async def handle(tmp_path, clock):
    store = ControlStore(tmp_path, "tiny")
    objective = Objective(2.0, 0.04)
    plane = ControlPlane(CONFIGURED, store, objective=objective, clock=clock, wall_clock=clock)
    return LocalHandle(plane)


@pytest.fixture
async def admin(handle):
    async def ignore(state):
        pass

    link = ControlClient(handle, ignore, lambda: REPORT)
    return operator_service(link)


def parsed(chunk):
    name, data = chunk.decode().strip().split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def test_the_first_event_has_the_history_and_later_ones_new_points(handle, admin, clock):
    for _ in range(6):
        await handle.plane.report(REPORT, 10.0)
        clock.now_s += 1
    events = await fleet_events(admin, "tiny", SharedMoments())
    assert parsed(await anext(events)) == ("hello", {"model": "tiny"})
    name, first = parsed(await anext(events))
    assert name == "now"
    assert len(first["figures"]) == 6
    assert first["status"]["replicas"][0]["report"]["num_decoding"] == 2
    assert first["status"]["speculation"]["without_rules"]["mode"] == "auto"
    assert first["replicas_needed"] is None
    clock.now_s += 30
    await handle.plane.report(REPORT, 40.0)
    _, second = parsed(await anext(events))
    assert second["replicas_needed"] == 1
    assert len(second["figures"]) == 1
    assert second["figures"][0]["time_s"] > first["figures"][-1]["time_s"]
    await events.aclose()
    assert admin.stats_streams.num_watchers == 0


async def test_a_drain_ends_the_stream_with_a_message(admin):
    events = await fleet_events(admin, "tiny", SharedMoments())
    await anext(events)
    await anext(events)
    admin.stats_streams.drain()
    name, data = parsed(await anext(events))
    assert name == "end"
    assert "draining" in data["message"]


async def test_without_a_control_plane_the_stream_is_not_opened(admin, handle):
    handle.plane = None
    with pytest.raises(NotReadyError):
        await fleet_events(admin, "tiny", SharedMoments())


async def test_the_number_of_pages_is_limited(admin):
    pages = [await fleet_events(admin, "tiny", SharedMoments()) for _ in range(MAX_WATCHERS)]
    with pytest.raises(OverloadedError):
        await fleet_events(admin, "tiny", SharedMoments())
    assert len(pages) == MAX_WATCHERS


async def test_pages_share_their_events(handle, admin, monkeypatch):
    numbers = {"fleet": 0, "history": 0}
    for name in numbers:
        method = getattr(ControlPlane, name)

        async def counted(plane, *arguments, name=name, method=method):
            numbers[name] += 1
            return await method(plane, *arguments)

        monkeypatch.setattr(ControlPlane, name, counted)
    shared = SharedMoments()
    pages = [await fleet_events(admin, "tiny", shared) for _ in range(20)]
    for _ in range(3):  # hello, and two moments
        events = await asyncio.gather(*(anext(page) for page in pages))
        assert len({*map(bytes, events)}) <= 2
    assert numbers["fleet"] + numbers["history"] <= 12, "each page asked the control plane"
