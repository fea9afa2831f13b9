"""Tests of the plan of drafts ahead: which outcomes, and how far after each."""

import pytest

from specdec.speculation.proposers.outcome_planner import OutcomePlanner, RowPlan, RowSize
from specdec.types.draft_messages import DraftPass
from specdec.types.drafts.draft_decision import DraftAhead
from specdec.types.drafts.draft_tree import MAX_TREE_NODES
from tests.clock import Clock


def timed(pass_s, row_s, target_s):
    """Return a planner that has observed the speeds of both devices."""
    clock = Clock()
    planner = OutcomePlanner(clock)
    planner.begin_step()
    clock.now_s += target_s
    planner.end_step()
    for num_tokens in (1, 10, 100):
        made = DraftPass(num_tokens, pass_s + row_s * num_tokens)
        planner.observe_passes([made, made])
    return planner


def test_a_step_that_is_lost_is_no_step():
    clock = Clock()
    planner = OutcomePlanner(clock)
    for seconds, is_lost in ((1.0, False), (60.0, True)):
        planner.begin_step()
        clock.now_s += seconds
        planner.end_step(is_lost=is_lost)
    clock.now_s += 60.0
    planner.end_step()  # of a step after which nothing was drafted
    assert planner._target_s == 1.0


@pytest.mark.parametrize("num_rows", [1, 4, 16])
@pytest.mark.parametrize(("pass_s", "row_s"), [(0.1, 0.0), (0.05, 0.002), (0.2, 0.001)])
def test_the_passes_end_within_a_step_of_the_target(num_rows, pass_s, row_s):
    planner = timed(pass_s, row_s, target_s=1.0)
    plans = planner.plan([RowSize(3, 4)] * num_rows, DraftAhead.OUTCOMES)
    levels = max(each.num_draft_tokens for each in plans)
    tokens = sum(sum(each.fan_out) for each in plans)
    seconds = pass_s + row_s * 4 * num_rows + levels * (pass_s + row_s * tokens)
    assert seconds <= 1.0 or (levels, tokens) == (1, num_rows)
    assert all(each.num_nodes <= MAX_TREE_NODES for each in plans)


def test_drafts_ahead_on_a_device_that_others_use_fit_into_what_they_leave():
    """With half of the time, passes that took a tenth of a step take a fifth."""
    plans = {}
    for share in (1.0, 0.5):
        planner = timed(0.1, 0.0, target_s=1.0)
        planner.observe_passes([], share)
        [plans[share]] = planner.plan([RowSize(3, 8)], DraftAhead.OUTCOMES)
    assert plans[1.0].num_draft_tokens > 3
    assert plans[0.5].num_draft_tokens == 3


def test_a_slow_draft_model_continues_one_outcome_by_a_token():
    planner = timed(0.6, 0.0, target_s=1.0)
    assert planner.plan([RowSize(3, 4)], DraftAhead.OUTCOMES) == [RowPlan((0, 0, 0, 1), 1)]


def test_a_row_that_waits_has_the_longer_draft_where_that_pays():
    """Nine tenths are accepted: the second token is worth more than the wait for it."""
    planner = timed(0.4, 0.0, target_s=1.0)
    for _ in range(200):
        planner.outcomes.observe(3, 3, 0, 1)
    for _ in range(20):
        planner.outcomes.observe(3, 0, 0, 1)
    [waits] = planner.plan([RowSize(3, 4)], DraftAhead.CONTINUING, may_wait=True)
    [does_not] = planner.plan([RowSize(3, 4)], DraftAhead.CONTINUING)
    assert waits.num_draft_tokens > does_not.num_draft_tokens == 1


def test_more_outcomes_are_tried_only_where_their_passes_pay():
    """Each token of a pass takes as long as the pass, or no time."""
    cheap, dear = timed(0.05, 0.0, target_s=1.0), timed(0.05, 0.3, target_s=1.0)
    for planner, most in ((cheap, 64), (dear, 1)):
        for _ in range(200):
            planner.outcomes.observe(2, 2, 0, 1)
            planner.outcomes.observe(2, 0, 0, 1)
        [plan] = planner.plan([RowSize(2, 2)], DraftAhead.OUTCOMES, may_wait=True)
        assert (sum(plan.fan_out) > 1) == (most > 1)


def test_a_pass_is_at_most_twice_as_large_as_one_that_was_measured():
    planner = OutcomePlanner(Clock())
    planner.begin_step()
    planner.end_step()
    planner._target_s = 1.0
    planner.observe_passes([DraftPass(4, 0.01), DraftPass(3, 0.01)])
    [plan] = planner.plan([RowSize(3, 4)], DraftAhead.OUTCOMES)
    assert sum(plan.fan_out) == 6


def test_before_any_measurement_some_outcomes_are_tried():
    planner = OutcomePlanner(Clock())
    plans = planner.plan([RowSize(2, 3), RowSize(0, 3)], DraftAhead.OUTCOMES)
    assert [(sum(plan.fan_out), plan.num_draft_tokens) for plan in plans] == [(4, 3), (4, 3)]


def test_continuing_has_one_chain_a_row():
    planner = timed(0.01, 0.0, target_s=1.0)
    plans = planner.plan([RowSize(3, 4), RowSize(0, 2)], DraftAhead.CONTINUING)
    assert plans == [RowPlan((0, 0, 0, 1), 4), RowPlan((1,), 2)]


def test_a_plan_without_room_becomes_one_chain():
    plan = RowPlan((2, 1, 1), 3)
    assert plan.num_nodes == 2 + 4 * 3
    assert plan.within(14) is plan
    assert plan.within(13) == RowPlan((0, 0, 1), 3)
    assert plan.within(4) == RowPlan((0, 0, 1), 2)
    assert plan.within(2) is None
