"""Operators, watchers and reports, on a clock that tests wind."""

import asyncio
from datetime import UTC, datetime

import pytest

from cluster.control_plane import SILENCE_LIMIT_S, ControlPlane
from cluster.control_store import ControlStore
from specdec.client import ReplicaReport, SpeculationChange
from specdec.errors import InvalidValueError, VersionConflictError
from specdec.speculation import SpeculationControl
from tests.clock import Clock

CONFIGURED = SpeculationControl("auto", threshold=32, num_speculative_tokens=3)
OFF = SpeculationChange(mode="off", updated_by="ann@host", reason="a test")


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def make(tmp_path, clock):
    def make(configured=CONFIGURED):
        store = ControlStore(tmp_path, "tiny")
        return ControlPlane(configured, store, clock=clock, wall_clock=lambda: 1e9)

    return make


@pytest.fixture
def plane(make):
    return make()


async def test_the_configured_values_hold_at_first(plane):
    state = await plane.speculation()
    assert state.in_force == state.configured == CONFIGURED
    assert (state.overridden, state.version, state.updated_at) == ((), 0, None)


async def test_a_change_says_who_when_and_why(plane):
    state = await plane.set_speculation(OFF)
    assert state == await plane.speculation()
    assert state.in_force == SpeculationControl("off", 32, 3)
    assert state.configured == CONFIGURED
    assert (state.overridden, state.version) == (("mode",), 1)
    assert state.updated_at == datetime.fromtimestamp(1e9, UTC)
    assert (state.updated_by, state.reason) == ("ann@host", "a test")


async def test_only_what_is_given_changes(plane):
    await plane.set_speculation(OFF)
    state = await plane.set_speculation(SpeculationChange(threshold=8))
    assert state.in_force == SpeculationControl("off", 8, 3)
    assert (state.overridden, state.updated_by) == (("mode", "threshold"), "")


async def test_a_reset_goes_before_what_comes_with_it(plane):
    await plane.set_speculation(OFF)
    state = await plane.set_speculation(SpeculationChange(reset=True, num_speculative_tokens=5))
    assert state.in_force == SpeculationControl("auto", 32, 5)
    state = await plane.set_speculation(SpeculationChange(reset=True))
    assert (state.in_force, state.overridden, state.version) == (CONFIGURED, (), 3)


async def test_a_change_for_another_version_changes_nothing(plane):
    await plane.set_speculation(OFF)
    with pytest.raises(VersionConflictError, match="expected_version is 0; it must be 1"):
        await plane.set_speculation(SpeculationChange(mode="on", expected_version=0))
    assert (await plane.speculation()).in_force.mode == "off"
    changed = await plane.set_speculation(SpeculationChange(mode="on", expected_version=1))
    assert changed.version == 2


async def test_of_two_control_planes_none_undoes_the_other(plane, make):
    other = make()
    await plane.set_speculation(OFF)
    state = await other.set_speculation(SpeculationChange(threshold=8))
    assert (state.in_force, state.version) == (SpeculationControl("off", 8, 3), 2)


async def test_an_override_outlasts_the_process_and_wins_over_a_new_configuration(plane, make):
    before = await plane.set_speculation(OFF)
    again = make()
    assert await again.speculation() == before
    other = make(SpeculationControl("auto", threshold=4, num_speculative_tokens=7))
    assert (await other.speculation()).in_force == SpeculationControl("off", 4, 7)


async def test_without_speculation_there_is_nothing_to_change(plane, make):
    await plane.set_speculation(SpeculationChange(mode="on"))
    without = make(None)
    state = await without.speculation()
    assert state.in_force == state.configured == SpeculationControl("off", 0, 0)
    assert state.overridden == ()
    with pytest.raises(InvalidValueError, match="speculative_config is 'none'"):
        await without.set_speculation(OFF)


async def test_a_watcher_is_told_at_once_what_it_does_not_know(plane):
    assert (await plane.watch(None, timeout_s=10)).version == 0
    await plane.set_speculation(OFF)
    assert (await plane.watch(0, timeout_s=10)).version == 1
    assert (await plane.watch(7, timeout_s=10)).version == 1  # of a state that is lost


async def test_a_change_wakes_every_watcher(plane):
    watchers = [asyncio.create_task(plane.watch(0, timeout_s=10)) for _ in range(3)]
    await asyncio.sleep(0.01)
    assert not any(watcher.done() for watcher in watchers)
    changed = await plane.set_speculation(OFF)
    assert await asyncio.wait_for(asyncio.gather(*watchers), 0.5) == [changed] * 3


async def test_a_watch_ends_when_nothing_happens(plane):
    assert (await plane.watch(0, timeout_s=0.01)).version == 0


async def test_replicas_are_listed_oldest_first_with_their_ages(plane, clock):
    young = ReplicaReport("young", is_ready=False, reason="the model is loading")
    old = ReplicaReport("old", is_ready=True, num_decoding=3)
    await plane.report(young, uptime_s=1)
    await plane.report(old, uptime_s=50)
    clock.now_s += 5
    await plane.report(young, uptime_s=6)
    status = await plane.status()
    assert [each.report for each in status.replicas] == [old, young]
    assert [(each.uptime_s, each.age_s) for each in status.replicas] == [(55, 5), (6, 0)]
    assert status.speculation == await plane.speculation()


async def test_replicas_that_fall_silent_or_fail_count_as_lost(plane, clock):
    for name in ("silent", "failed", "asked to end", "well"):
        await plane.report(ReplicaReport(name, is_ready=True), uptime_s=0)
    await plane.leave("failed", has_failed=True)
    await plane.leave("asked to end", has_failed=False)
    await plane.leave("unknown", has_failed=True)
    clock.now_s += SILENCE_LIMIT_S
    await plane.report(ReplicaReport("well", is_ready=True), uptime_s=0)
    assert len((await plane.status()).replicas) == 2
    clock.now_s += 1
    status = await plane.status()
    assert [each.report.replica_id for each in status.replicas] == ["well"]
    assert status.num_lost_replicas == 2


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({}, "change"),
        ({"reason": "none given"}, "change"),
        ({"mode": "maybe"}, "mode"),
        ({"threshold": 4097}, "threshold"),
        ({"num_speculative_tokens": 33}, "num_speculative_tokens"),
        ({"reset": True, "reason": "x" * 257}, "reason"),
        ({"reset": True, "reason": "two\nlines"}, "reason"),
        ({"reset": True, "updated_by": "x" * 129}, "updated_by"),
    ],
)
def test_a_change_that_cannot_be_is_named(values, field):
    with pytest.raises(InvalidValueError) as caught:
        SpeculationChange(**values)
    assert caught.value.field == field
