"""A Router's client of the ControlPlane, with and without a connection, and statistics."""

import asyncio
from dataclasses import replace
from unittest.mock import Mock

import pytest
from ray.exceptions import RayTaskError

from cluster.control import client
from cluster.control.client import ControlClient, StatsStreams
from cluster.control.plane import ControlPlane
from cluster.control.store import ControlStore
from specdec.client import ReplicaReport, SpeculationChange
from specdec.types.control import SpeculationControl
from specdec.types.errors import InvalidValueError, NotReadyError, OverloadedError
from tests.cluster.admin_service import LocalHandle
from tests.waiting import eventually

CONFIGURED = SpeculationControl("auto", threshold=32, num_speculative_tokens=3)


class FakeRouter:
    """Keeps the states that it received, and reports what a test has set."""

    def __init__(self):
        self.states = []
        self.applied = asyncio.Event()
        self.current = ReplicaReport("r1", is_ready=True)

    async def apply(self, state):
        self.states.append(state)
        self.applied.set()

    def report(self):
        return self.current

    async def next_version(self):
        """Wait for the next state and return its version."""
        await asyncio.wait_for(self.applied.wait(), 30)
        self.applied.clear()
        return self.states[-1].version


@pytest.fixture
def make_plane(tmp_path):
    return lambda: ControlPlane(CONFIGURED, ControlStore(tmp_path, "tiny"))


@pytest.fixture
def handle(make_plane):
    return LocalHandle(make_plane(), silent_s=60.0)


@pytest.fixture
def router():
    return FakeRouter()


@pytest.fixture
async def link(handle, router, monkeypatch):
    monkeypatch.setattr(client, "_REPORT_PERIOD_S", 0.02)
    monkeypatch.setattr(client, "_WATCH_S", 0.2)
    link = ControlClient(handle, router.apply, router.report)
    link.start()
    yield link
    await link.close("r1", has_failed=False)


async def reported(plane, report=None):
    """Wait for a report, of a content where one is given; return the reports of all replicas."""

    async def reports():
        return [replica.report for replica in (await plane.status()).replicas]

    async with asyncio.timeout(30):
        while not (found := await reports()) or (report is not None and report not in found):
            await asyncio.sleep(0.005)
    return found


async def test_a_router_receives_the_first_state_and_then_changes_only(link, router):
    assert await router.next_version() == 0
    await link.set_speculation(SpeculationChange(mode="off"))
    assert await router.next_version() == 1
    await asyncio.sleep(0.5)  # two watches end without a change
    assert [state.version for state in router.states] == [0, 1]


async def test_a_restarted_control_plane_is_watched_again(link, handle, router, make_plane):
    assert await router.next_version() == 0
    handle.plane, link._call_timeout_s = None, 0.1
    with pytest.raises(NotReadyError, match="the control plane does not answer"):
        await link.speculation()
    await asyncio.sleep(0.4)
    assert len(router.states) == 1
    handle.plane = make_plane()
    await handle.plane.set_speculation(SpeculationChange(threshold=4))
    assert await router.next_version() == 1
    assert router.states[-1].in_force.threshold == 4


async def test_a_restarted_control_plane_gets_a_report_of_an_idle_replica(
    link, handle, router, make_plane
):
    assert await router.next_version() == 0
    handle.plane, link._call_timeout_s = None, 0.1
    await asyncio.sleep(0.4)
    handle.plane = make_plane()
    assert await router.next_version() == 0
    assert await reported(handle.plane) == [router.current]


async def test_a_replica_reports_once_that_there_is_no_more_news(link, handle, router, monkeypatch):
    reports, report = [], handle.plane.report

    async def record(each, uptime_s):
        reports.append(each)
        return await report(each, uptime_s)

    monkeypatch.setattr(handle.plane, "report", record)
    monkeypatch.setattr(client, "_REPORT_PERIOD_S", 0.01)
    router.current = replace(router.current, num_running=1)
    await eventually(lambda: reports.count(router.current) == 2)
    made = Mock(wraps=link._make_report)
    monkeypatch.setattr(link, "_make_report", made)
    await eventually(lambda: made.call_count >= 3)
    assert reports.count(router.current) == 2


async def test_the_state_of_a_new_store_applies_despite_its_lower_version(
    link, handle, router, tmp_path
):
    await link.set_speculation(SpeculationChange(mode="off"))
    while await router.next_version() != 1:
        pass
    plane, handle.plane, link._call_timeout_s = handle.plane, None, 0.1
    await asyncio.sleep(0.4)
    handle.plane = ControlPlane(CONFIGURED, ControlStore(tmp_path / "new", "tiny"))
    assert await router.next_version() == 0
    assert plane is not handle.plane


async def test_a_state_that_is_refused_does_not_end_the_watch(handle, router, caplog):
    """As in an update to another verifier, while replicas of both configurations run."""

    async def refuse_two(state):
        await router.apply(state)
        if len(router.states) <= 2:
            raise InvalidValueError("verifier", "block", "allowed")

    link = ControlClient(handle, refuse_two, router.report)
    link.start()
    try:
        assert await router.next_version() == 0
        for _ in range(2):
            assert await router.next_version() == 0, "it is tried again"
        await handle.plane.set_speculation(SpeculationChange(mode="off"))
        assert await router.next_version() == 1
    finally:
        await link.close("r1", has_failed=False)
    message = "settings of the control plane are not in force: verifier is 'block'"
    assert caplog.text.count(message) == 1, "once, not in each attempt"


async def test_reports_are_sent_when_something_changed(link, handle, router):
    assert await reported(handle.plane) == [router.current]
    router.current = ReplicaReport("r1", is_ready=True, num_running=1)
    assert await reported(handle.plane, router.current) == [router.current]


async def test_fresh_fleet_shows_the_current_state_of_this_replica(link, router):
    await asyncio.sleep(0.1)
    router.current = ReplicaReport("r1", is_ready=True, num_running=2)
    [replica] = (await link.fresh_fleet()).status.replicas
    assert replica.report == router.current


async def test_the_own_status_is_available_without_a_connection(link, handle, router):
    await link.speculation()
    assert link.is_connected
    handle.plane, link._call_timeout_s = None, 0.1
    with pytest.raises(NotReadyError):
        await link.fresh_fleet()
    assert not link.is_connected
    assert link.own_status().report == router.current


async def test_an_error_of_the_control_plane_is_an_answer(link):
    with pytest.raises(InvalidValueError):
        await link.audit_log(-1, "")
    assert link.is_connected


async def test_a_state_in_force_is_reported_at_once(handle, router, monkeypatch):
    monkeypatch.setattr(client, "_REPORT_PERIOD_S", 60.0)
    link = ControlClient(handle, router.apply, router.report)
    link.start()
    while await router.next_version() != 0:
        pass
    await reported(handle.plane)
    router.current = ReplicaReport("r1", is_ready=True, speculation_version=1)
    await handle.plane.set_speculation(SpeculationChange(mode="off"))
    assert await router.next_version() == 1
    assert await reported(handle.plane, router.current) == [router.current]
    await link.close("r1", has_failed=False)


async def test_the_status_shows_this_replica_as_it_is_now(link, router):
    await asyncio.sleep(0.1)
    router.current = ReplicaReport("r1", is_ready=True, num_running=2)
    [replica] = (await link.status()).replicas
    assert replica.report == router.current


@pytest.mark.parametrize("has_failed", [False, True])
async def test_a_router_that_ends_unregisters(handle, router, has_failed):
    link = ControlClient(handle, router.apply, router.report)
    link.start()
    await router.next_version()
    await reported(handle.plane)
    await link.close("r1", has_failed=has_failed)
    status = await handle.plane.status()
    assert (status.replicas, status.num_lost_replicas) == ((), int(has_failed))


async def test_errors_of_the_control_plane_arrive_unwrapped(handle, router, monkeypatch):
    """Ray wraps an error and replaces its text by a traceback."""
    cause = InvalidValueError("mode", "maybe", "one of auto, on, off")

    async def fail():
        raise RayTaskError("speculation", "Traceback ...", cause, pid=1, ip="127.0.0.1")

    monkeypatch.setattr(handle.plane, "speculation", fail)
    with pytest.raises(InvalidValueError) as caught:
        await ControlClient(handle, router.apply, router.report).speculation()
    assert caught.value is cause


async def statistics():
    return "statistics"


async def test_a_stream_ends_when_the_replica_drains_and_no_other_begins():
    streams = StatsStreams(statistics)
    stream = streams.watch(60)
    assert await anext(stream) == "statistics"
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0.01)
    streams.drain()
    with pytest.raises(NotReadyError, match="draining"):
        await asyncio.wait_for(waiting, 30)
    with pytest.raises(NotReadyError):
        await anext(streams.watch(1))
    assert streams.num_watchers == 0


async def test_the_number_of_watchers_is_limited(monkeypatch):
    monkeypatch.setattr(client, "MAX_WATCHERS", 2)
    streams = StatsStreams(statistics)
    open_streams = [streams.watch(1) for _ in range(2)]
    for stream in open_streams:
        await anext(stream)
    with pytest.raises(OverloadedError):
        await anext(streams.watch(1))
    await open_streams[0].aclose()
    assert await anext(streams.watch(1)) == "statistics"


async def test_an_unavailable_control_plane_ends_a_stream():
    async def fail():
        raise NotReadyError("unavailable")

    streams = StatsStreams(fail)
    with pytest.raises(NotReadyError, match="unavailable"):
        await anext(streams.watch(1))
    assert streams.num_watchers == 0


async def test_watchers_share_statistics_and_their_encoding():
    numbers = {"asked": 0, "encoded": 0}

    async def statistics():
        numbers["asked"] += 1
        await asyncio.sleep(0.01)
        return [numbers["asked"]]

    def encode(fleet):
        numbers["encoded"] += 1
        return str(fleet)

    async def follow(stream):
        return [streams.encoded(await anext(stream), encode) for _ in range(4)]

    streams = StatsStreams(statistics)
    watchers = [streams.watch(client.MIN_INTERVAL_S) for _ in range(client.MAX_WATCHERS)]
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    seen = await asyncio.gather(*map(follow, watchers))
    most = 1 + (loop.time() - began_s) / client.MIN_INTERVAL_S
    assert all(len({*each}) == 4 for each in seen), "a watcher got the same statistics twice"
    assert numbers["encoded"] <= numbers["asked"] <= most


async def test_a_watcher_that_leaves_does_not_cancel_the_query_of_others():
    async def statistics():
        await asyncio.sleep(0.05)
        return "statistics"

    streams = StatsStreams(statistics)
    leaving = asyncio.ensure_future(anext(streams.watch(1)))
    staying = asyncio.ensure_future(anext(streams.watch(1)))
    await asyncio.sleep(0.01)
    leaving.cancel()
    assert await staying == "statistics"
