# Modules: cluster.control.overrides
"""Operators, watchers and reports, with a fake clock."""

import asyncio
import pickle
from datetime import UTC, datetime
from unittest.mock import Mock

import pytest

from cluster.control import client
from cluster.control.client import ControlClient
from cluster.control.overrides import OverrideLimits
from cluster.control.peers import ServiceCard
from cluster.control.plane import (
    OVERDUE_S,
    SILENCE_LIMIT_S,
    ControlPlaneReplica,
)
from cluster.control.store import ControlStore, StoredSpeculation
from specdec.client import Counts, ReplicaReport, SpeculationChange
from specdec.types.control import RateRule, SpeculationControl
from specdec.types.errors import InvalidValueError, StorageError, VersionConflictError
from tests.cluster.admin_service import LocalHandle
from tests.cluster.control.conftest import CONFIGURED

OFF = SpeculationChange(mode="off", updated_by="ann@host", reason="a test")


async def test_the_configured_values_hold_at_first(plane):
    state = await plane.speculation()
    assert state.in_force == state.configured == CONFIGURED
    assert (state.overridden, state.version, state.updated_at) == ((), 0, None)


async def test_a_change_records_author_time_and_reason(plane):
    state = await plane.set_speculation(OFF)
    assert state == await plane.speculation()
    assert state.in_force == SpeculationControl("off", 32, 3)
    assert state.configured == CONFIGURED
    assert (state.overridden, state.version) == (("mode",), 1)
    assert state.updated_at == datetime.fromtimestamp(1e9, UTC)
    assert (state.updated_by, state.reason) == ("ann@host", "a test")


async def test_only_given_settings_change(plane):
    await plane.set_speculation(OFF)
    state = await plane.set_speculation(SpeculationChange(threshold=8))
    assert state.in_force == SpeculationControl("off", 8, 3)
    assert (state.overridden, state.updated_by) == (("mode", "threshold"), "")


async def test_a_reset_is_applied_before_the_given_settings(plane):
    await plane.set_speculation(OFF)
    state = await plane.set_speculation(SpeculationChange(reset=True, num_speculative_tokens=5))
    assert state.in_force == SpeculationControl("auto", 32, 5)
    state = await plane.set_speculation(SpeculationChange(reset=True))
    assert (state.in_force, state.overridden, state.version) == (CONFIGURED, (), 3)


async def test_a_change_for_another_version_changes_nothing(plane):
    await plane.set_speculation(OFF)
    with pytest.raises(
        VersionConflictError, match="expected_version is 0; the current version is 1"
    ):
        await plane.set_speculation(SpeculationChange(mode="on", expected_version=0))
    assert (await plane.speculation()).in_force.mode == "off"
    changed = await plane.set_speculation(SpeculationChange(mode="on", expected_version=1))
    assert changed.version == 2


async def test_changes_by_two_control_planes_are_both_kept(plane, make):
    other = make()
    await plane.set_speculation(OFF)
    state = await other.set_speculation(SpeculationChange(threshold=8))
    assert (state.in_force, state.version) == (SpeculationControl("off", 8, 3), 2)


async def test_a_change_by_another_control_plane_comes_into_force(plane, make):
    """As in an upgrade, in which the former one still answers while the next one has started."""
    following = make()
    stamp = (await following.watch(None, timeout_s=0)).stamp
    state = await plane.set_speculation(OFF)
    assert await following.watch(stamp, timeout_s=0) == state
    assert await following.speculation() == state
    state = await plane.set_speculation(SpeculationChange(threshold=8))
    with pytest.raises(VersionConflictError, match="the current version is 2"):
        await following.set_speculation(SpeculationChange(mode="on", expected_version=1))
    assert (await following.status()).speculation == state


async def test_of_an_expiry_that_is_not_stored_and_a_change_the_change_wins(
    plane, tmp_path, clock, monkeypatch
):
    await plane.set_speculation(SpeculationChange(mode="off", ttl_s=60))
    clock.now_s += 61
    store = ControlStore(tmp_path, "tiny")
    with monkeypatch.context() as full:
        full.setattr(ControlStore, "replace", Mock(side_effect=StorageError("a", "full")))
        assert (await plane.speculation()).version == 2
    assert store.replace(StoredSpeculation(2, {"mode": "on"}), {"mode": "on"})
    state = await plane.speculation()
    assert (state.in_force.mode, state.version) == ("on", 2)
    state = await plane.set_speculation(SpeculationChange(threshold=5, expected_version=2))
    assert (state.in_force.mode, state.in_force.threshold, state.version) == ("on", 5, 3)


async def test_an_override_survives_a_restart_and_a_new_configuration(plane, make):
    before = await plane.set_speculation(OFF)
    again = make()
    assert await again.speculation() == before
    other = make(SpeculationControl("auto", threshold=4, num_speculative_tokens=7))
    assert (await other.speculation()).in_force == SpeculationControl("off", 4, 7)


async def test_without_speculation_changes_are_refused(plane, make):
    await plane.set_speculation(SpeculationChange(mode="on"))
    without = make(None)
    state = await without.speculation()
    assert state.in_force == state.configured == SpeculationControl("off", 0, 0)
    assert state.overridden == ()
    with pytest.raises(InvalidValueError, match="speculative_config is 'none'"):
        await without.set_speculation(OFF)


async def test_a_watcher_receives_an_unknown_state_at_once(plane):
    assert (await plane.watch(None, timeout_s=10)).version == 0
    await plane.set_speculation(OFF)
    assert (await plane.watch((0, None), timeout_s=10)).version == 1
    assert (await plane.watch((7, None), timeout_s=10)).version == 1  # of a state that is lost


async def test_a_change_wakes_every_watcher(plane):
    watchers = [asyncio.create_task(plane.watch((0, None), timeout_s=60)) for _ in range(3)]
    await asyncio.sleep(0.01)
    assert not any(watcher.done() for watcher in watchers)
    changed = await plane.set_speculation(OFF)
    assert await asyncio.wait_for(asyncio.gather(*watchers), 30) == [changed] * 3


async def test_a_watch_without_a_change_times_out(plane):
    assert (await plane.watch((0, None), timeout_s=0.01)).version == 0


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


async def test_replicas_that_started_together_keep_their_order(plane, clock):
    order = []
    for delays_s in ((0.002, 0.001), (0.003, 0.004), (0.002, 0.003)):
        clock.now_s += 10
        for name, delay_s in zip(("r1", "r2"), delays_s, strict=True):
            await plane.report(ReplicaReport(name, is_ready=True), clock.now_s - delay_s)
        order.append([each.report.replica_id for each in (await plane.status()).replicas])
    assert order == [["r2", "r1"]] * 3


async def test_a_first_report_that_is_late_does_not_make_a_replica_younger(plane, clock):
    for delays_s in ((9, 0.0), (0.0, 0.5)):
        clock.now_s += 10
        for name, delay_s in zip(("r1", "r2"), delays_s, strict=True):
            await plane.report(ReplicaReport(name, is_ready=True), clock.now_s - delay_s)
    status = await plane.status()
    assert [each.uptime_s for each in status.replicas] == [clock.now_s] * 2


async def test_an_outdated_report_is_ignored(plane):
    later = ReplicaReport("r1", is_ready=True, counts=Counts(num_steps=9))
    await plane.report(later, uptime_s=5.1)
    await plane.report(ReplicaReport("r1", is_ready=True, counts=Counts(num_steps=8)), uptime_s=5.0)
    [replica] = (await plane.status()).replicas
    assert replica.report == later


async def test_a_replica_whose_report_is_overdue_is_not_ready(plane, clock):
    await plane.report(ReplicaReport("r1", is_ready=True, counts=Counts(num_steps=3)), uptime_s=0)
    clock.now_s += OVERDUE_S
    [replica] = (await plane.status()).replicas
    assert replica.report.is_ready
    clock.now_s += 1
    fleet = await plane.fleet()
    [replica] = fleet.status.replicas
    assert (replica.report.is_ready, replica.report.reason) == (False, "no report for 37 s")
    assert (fleet.status.num_lost_replicas, fleet.totals.num_steps) == (0, 3)
    await plane.report(ReplicaReport("r1", is_ready=True), uptime_s=38)
    [replica] = (await plane.status()).replicas
    assert replica.report.is_ready


def test_an_idle_replica_is_never_overdue():
    between_reports_s = client._IDLE_REPORT_PERIOD_S + client._REPORT_PERIOD_S
    a_failed_call_s = client._CALL_TIMEOUT_S + client._REPORT_PERIOD_S
    assert between_reports_s + a_failed_call_s < OVERDUE_S


async def test_silent_and_failed_replicas_count_as_lost(plane, clock):
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


async def test_a_silent_replica_that_returns_is_counted_once(plane, clock):
    await plane.report(ReplicaReport("r1", is_ready=True, counts=Counts(num_steps=3)), uptime_s=0)
    clock.now_s += SILENCE_LIMIT_S + 1
    assert (await plane.fleet()).totals.num_steps == 3, "of a replica that counts as lost"
    for num_steps in (5, 6):
        report = ReplicaReport("r1", is_ready=True, counts=Counts(num_steps=num_steps))
        await plane.report(report, uptime_s=100 + num_steps)
        assert (await plane.fleet()).totals.num_steps == num_steps
    await plane.leave("r1", has_failed=False)
    assert (await plane.fleet()).totals.num_steps == 6


async def test_a_report_that_a_leave_has_overtaken_is_ignored(plane, clock):
    report = ReplicaReport("r1", is_ready=True, counts=Counts(num_steps=3))
    await plane.report(report, uptime_s=1)
    await plane.leave("r1", has_failed=False)
    await plane.report(report, uptime_s=2)
    fleet = await plane.fleet()
    assert (fleet.status.replicas, fleet.totals.num_steps) == ((), 3)
    clock.now_s += SILENCE_LIMIT_S + 1
    assert (await plane.status()).num_lost_replicas == 0


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
        ({"allow_request_override": 1}, "allow_request_override"),
        ({"allowed_verifiers": ()}, "allowed_verifiers"),
        ({"allowed_verifiers": ("coupled", "luck")}, "allowed_verifiers[1]"),
        ({"ttl_s": -1}, "ttl_s"),
        ({"ttl_s": float("nan")}, "ttl_s"),
        ({"ttl_s": 31 * 86400}, "ttl_s"),
        ({"rules": (RateRule(5),)}, "rules[0]"),
    ],
)
def test_an_invalid_change_is_refused(values, field):
    with pytest.raises(InvalidValueError) as caught:
        SpeculationChange(**values)
    assert caught.value.field == field


async def test_of_two_writers_with_the_same_version_one_wins(plane, make):
    other = make()
    changes = [SpeculationChange(threshold=n, expected_version=0) for n in (4, 8)]
    results = await asyncio.gather(
        plane.set_speculation(changes[0]), other.set_speculation(changes[1]), return_exceptions=True
    )
    assert sorted(type(each).__name__ for each in results) == [
        "SpeculationState",
        "VersionConflictError",
    ]


async def test_a_method_that_is_loaded_and_one_that_is_not(plane, make):
    state = await plane.set_speculation(SpeculationChange(method="ngram"))
    assert state.in_force.method == "ngram"
    with pytest.raises(InvalidValueError, match="one of those loaded: draft_model, ngram"):
        await plane.set_speculation(SpeculationChange(method="suffix"))
    alone = make(limits=OverrideLimits(("ngram",)))
    assert (await alone.speculation()).in_force.method is None, "it waits for a choice to return"
    with pytest.raises(InvalidValueError, match="one method alone is loaded"):
        await alone.set_speculation(SpeculationChange(method="ngram"))


async def test_the_services_own_verifier_stays_allowed(plane):
    with pytest.raises(InvalidValueError, match="a list with coupled in it"):
        await plane.set_speculation(SpeculationChange(allowed_verifiers=("block",)))
    state = await plane.set_speculation(SpeculationChange(allowed_verifiers=("coupled", "block")))
    assert state.in_force.allowed_verifiers == ("coupled", "block")


async def test_operators_allow_synthetic_acceptance_only_where_it_is_configured(plane, make):
    change = SpeculationChange(allowed_verifiers=("coupled", "synthetic"))
    with pytest.raises(InvalidValueError, match="a list without synthetic"):
        await plane.set_speculation(change)
    limits = OverrideLimits(("ngram",), verifiers=("coupled", "synthetic"))
    state = await make(limits=limits).set_speculation(change)
    assert state.in_force.allowed_verifiers == ("coupled", "synthetic")
    state = await make().speculation()  # after a restart without it
    assert "synthetic" not in state.in_force.allowed_verifiers


async def test_overrides_expire(plane, make, clock):
    change = SpeculationChange(mode="off", ttl_s=60)
    state = await plane.set_speculation(change)
    assert state.expires_at == datetime.fromtimestamp(1e9 + 60, UTC)
    state = await plane.set_speculation(SpeculationChange(threshold=5))
    assert state.expires_at is not None, "what a change leaves out stays"
    watcher = asyncio.create_task(plane.watch(state.stamp, timeout_s=10))
    clock.now_s += 59
    plane.tick()
    await asyncio.sleep(0.01)
    assert not watcher.done()
    clock.now_s += 1
    plane.tick()
    state = await watcher
    assert (state.in_force, state.overridden, state.expires_at) == (CONFIGURED, (), None)
    assert (state.version, state.reason) == (3, "expired")
    assert await make().speculation() == state


async def test_overrides_expire_while_no_process_runs(plane, make, clock):
    await plane.set_speculation(SpeculationChange(mode="off", ttl_s=60))
    clock.now_s += 61
    assert (await make().speculation()).in_force == CONFIGURED


async def test_overrides_expire_on_a_full_disk(plane, make, clock, monkeypatch, caplog):
    await plane.set_speculation(SpeculationChange(mode="off", ttl_s=60))

    def refuse(store, stored, change):
        raise StorageError("control.sqlite3", "database or disk is full")

    monkeypatch.setattr(ControlStore, "replace", refuse)
    clock.now_s += 61
    for _ in range(3):
        assert (await plane.speculation()).in_force == CONFIGURED
    assert caplog.text.count("database or disk is full") == 1
    with pytest.raises(StorageError):
        await plane.set_speculation(SpeculationChange(threshold=5))
    monkeypatch.undo()
    state = await plane.set_speculation(SpeculationChange(threshold=5, expected_version=2))
    assert (state.in_force.mode, state.in_force.threshold, state.version) == ("auto", 5, 3)
    assert [each.reason for each in (await plane.audit_log(0, "")).entries] == ["", "expired", ""]
    assert await make().speculation() == state


async def test_an_expiry_can_be_removed(plane, clock):
    await plane.set_speculation(SpeculationChange(mode="off", ttl_s=60))
    await plane.set_speculation(SpeculationChange(ttl_s=0))
    clock.now_s += 61
    assert (await plane.speculation()).in_force.mode == "off"


async def test_the_audit_log_lists_changes(plane):
    await plane.set_speculation(OFF)
    rules = (RateRule(5.0, num_speculative_tokens=1),)
    await plane.set_speculation(SpeculationChange(reset=True, rules=rules, ttl_s=9))
    page = await plane.audit_log(0, "")
    newest, oldest = page.entries
    assert newest.change["reset"] is True
    assert newest.change["ttl_s"] == 9
    assert newest.change["rules"][0]["min_requests_per_s"] == 5.0
    assert oldest.change == {"mode": "off"}
    assert (oldest.version, oldest.updated_by, oldest.reason) == (1, "ann@host", "a test")
    first = await plane.audit_log(1, "")
    rest = await plane.audit_log(1, first.next_page_token)
    assert (first.entries, rest.entries) == ((newest,), (oldest,))
    assert rest.next_page_token == ""


@pytest.mark.parametrize(
    ("size", "token", "field"),
    [(201, "", "page_size"), (-1, "", "page_size"), (1, "x", "page_token")],
)
async def test_an_invalid_page_is_refused(plane, size, token, field):
    with pytest.raises(InvalidValueError) as caught:
        await plane.audit_log(size, token)
    assert caught.value.field == field


async def test_a_deployment_returns_its_refusals_for_the_client_to_raise(tmp_path):
    card = ServiceCard("tiny", 1)
    plane = ControlPlaneReplica(None, OverrideLimits(), tmp_path, card, None)
    refused = await plane.audit_log(5, "wombat")
    assert isinstance(refused, InvalidValueError)
    assert str(pickle.loads(pickle.dumps(refused))) == str(refused)
    link = ControlClient(LocalHandle(plane), None, None)
    with pytest.raises(InvalidValueError, match="page_token"):
        await link.audit_log(5, "wombat")
