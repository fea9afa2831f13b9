"""Rules by request rate in force, with the state, preview and history that show them."""

import asyncio
from itertools import pairwise

import pytest

from cluster.control import plane as control_plane
from specdec.client import Counts, ReplicaReport, SpeculationChange
from specdec.types.control import RateRule, SpeculationControl
from specdec.types.errors import InvalidValueError
from tests.cluster.control.conftest import CONFIGURED

RULES = (RateRule(5.0, num_speculative_tokens=1), RateRule(20.0, mode="off"))


async def arrive(plane, clock, per_s, seconds, total=0):
    """Send reports of two replicas that receive `per_s` requests together."""
    for _ in range(seconds):
        clock.now_s += 1
        total += per_s / 2
        for name in ("a", "b"):
            counts = Counts(num_requests=int(total))
            await plane.report(ReplicaReport(name, is_ready=True, counts=counts), 0)
    return total


async def test_rules_use_the_request_rate_of_all_replicas(plane, clock):
    await plane.set_speculation(SpeculationChange(rules=RULES))
    total = await arrive(plane, clock, 2, 15)
    assert (await plane.speculation()).active_rule is None
    total = await arrive(plane, clock, 10, 15, total)
    state = await plane.speculation()
    assert state.active_rule == 0
    assert state.in_force == SpeculationControl("auto", 32, 1)
    assert state.version == 1, "a rule makes no version"
    total = await arrive(plane, clock, 40, 15, total)
    assert (await plane.speculation()).in_force.mode == "off"
    assert (await plane.fleet()).requests_per_s == pytest.approx(40)
    await arrive(plane, clock, 0, 1, total)
    clock.now_s += 11
    state = await plane.speculation()
    assert (state.active_rule, state.in_force) == (None, CONFIGURED)


async def test_a_rule_wakes_the_watchers(plane, clock):
    state = await plane.set_speculation(SpeculationChange(rules=RULES))
    await arrive(plane, clock, 0, 1)
    watcher = asyncio.create_task(plane.watch(state.stamp, timeout_s=60))
    await asyncio.sleep(0.01)
    await arrive(plane, clock, 30, 12)
    assert (await asyncio.wait_for(watcher, 30)).active_rule is not None


async def test_a_rate_around_a_limit_does_not_make_rules_flap(plane, clock):
    await plane.set_speculation(SpeculationChange(rules=RULES))
    total, seen = 0, []
    for per_s in (6, 4.4) * 20:
        total = await arrive(plane, clock, per_s, 10, total)
        seen.append((await plane.speculation()).active_rule)
    assert sum(a != b for a, b in pairwise(seen)) <= 1


async def test_an_active_rule_outlasts_the_change_of_another_setting(plane, clock):
    await plane.set_speculation(SpeculationChange(rules=RULES))
    total = await arrive(plane, clock, 6, 12)
    await arrive(plane, clock, 4.4, 12, total)
    change = SpeculationChange(threshold=16)
    assert (await plane.preview(change)).active_rule == 0
    assert (await plane.set_speculation(change)).active_rule == 0
    others = await plane.set_speculation(SpeculationChange(rules=RULES[:1]))
    assert others.active_rule is None, "4.4/s are too few to begin with other rules"


@pytest.mark.parametrize("num_running", [1, 0])
async def test_missing_reports_neither_end_nor_begin_a_rule(plane, clock, num_running):
    """Steady 18/s, with rules at 20/s and at 5/s; no report for 12 s.

    Short requests may run between the reports only.
    """
    await plane.set_speculation(SpeculationChange(rules=RULES))
    for second in range(1, 50):
        clock.now_s += 1
        if not 20 <= second < 32:
            counts = Counts(num_requests=18 * second)
            report = ReplicaReport("a", is_ready=True, counts=counts, num_running=num_running)
            await plane.report(report, second)
        if second > 10:
            assert (await plane.speculation()).active_rule == 0, second
    clock.now_s += 29
    assert (await plane.speculation()).active_rule == 0
    clock.now_s += 2  # it may be lost
    assert (await plane.speculation()).active_rule is None


async def test_a_control_plane_that_restarts_finds_the_rule_within_seconds(plane, clock):
    await plane.set_speculation(SpeculationChange(rules=RULES))
    await arrive(plane, clock, 30, 5, total=1000)
    assert (await plane.speculation()).active_rule == 1


async def test_counts_of_replicas_that_end_are_kept(plane, clock):
    for name, count in (("a", 5), ("b", 7)):
        counts = Counts(num_requests=count, decisions={"goodput": count})
        await plane.report(ReplicaReport(name, is_ready=True, counts=counts), 0)
    await plane.leave("a", has_failed=False)
    fleet = await plane.fleet()
    assert [each.report.replica_id for each in fleet.status.replicas] == ["b"]
    assert fleet.totals.num_requests == 12
    assert fleet.totals.decisions == {"goodput": 12}


async def test_without_rules_or_expiry_nothing_ticks(plane, monkeypatch):
    ticks = []
    monkeypatch.setattr(control_plane, "_TICK_S", 0.01)
    await plane.watch(None, timeout_s=1)
    monkeypatch.setattr(plane, "tick", lambda: ticks.append(1))
    await asyncio.sleep(0.1)
    assert ticks == []
    monkeypatch.undo()
    monkeypatch.setattr(control_plane, "_TICK_S", 0.01)
    state = await plane.set_speculation(SpeculationChange(mode="off", ttl_s=60))
    assert state.expires_at is not None
    monkeypatch.setattr(plane, "tick", lambda: ticks.append(1))
    await asyncio.sleep(0.1)
    assert ticks


async def test_the_state_has_the_settings_with_and_without_rules(plane, clock):
    rules = (RateRule(0.5, mode="off", num_speculative_tokens=1),)
    await plane.set_speculation(SpeculationChange(num_speculative_tokens=5, rules=rules))
    await arrive(plane, clock, per_s=1, seconds=10)
    state = await plane.speculation()
    assert (state.in_force.mode, state.in_force.num_speculative_tokens) == ("off", 1)
    assert state.without_rules == SpeculationControl("auto", 32, 5)


async def test_a_preview_is_for_the_present_load(plane, clock):
    rules = (RateRule(2.0, num_speculative_tokens=2), RateRule(20.0, mode="off"))
    change = SpeculationChange(num_speculative_tokens=7, rules=rules)
    quiet = await plane.preview(change)
    assert (quiet.in_force.num_speculative_tokens, quiet.active_rule) == (7, None)
    await arrive(plane, clock, per_s=4, seconds=10)
    busy = await plane.preview(change)
    assert busy.requests_per_s == pytest.approx(4, abs=0.5)
    assert (busy.in_force.mode, busy.in_force.num_speculative_tokens) == ("auto", 2)
    assert busy.active_rule == 0
    assert (await plane.preview(None)).in_force == CONFIGURED
    assert (await plane.speculation()).version == 0
    with pytest.raises(InvalidValueError, match="method"):
        await plane.preview(SpeculationChange(method="suffix"))


async def test_reports_and_queries_add_to_the_history(plane, clock):
    for second in range(4):
        await plane.report(ReplicaReport("a", is_ready=True, num_decoding=second), 50.0)
        await plane.report(ReplicaReport("b", is_ready=True, num_decoding=second), 50.0)
        clock.now_s += 1
    points = await plane.history(0.0)
    # The first report has nothing before it to be a difference to, and a point has the report of
    # one replica and what the other reported a second before.
    assert [point.num_decoding for point in points] == [1, 3, 5]
    assert await plane.history(points[1].time_s) == points[2:]
    await plane.fleet()
    assert (await plane.history(points[-1].time_s))[0].num_decoding == 6
