"""Tests of the plan of drafts ahead: which outcomes, and how many in the time there is."""

import random

import pytest

from specdec.speculation.proposers.outcome_planner import (
    OutcomePlanner,
    OutcomeStatistics,
    PassSpeed,
    RowPlan,
)
from specdec.types.draft_decision import DraftAhead
from specdec.types.draft_tree import MAX_TREE_NODES
from specdec.types.messages import DraftPass
from tests.clock import Clock

RANKS = (0.5, 0.2, 0.1, 0.05)
"""Probability of each rank of the token after a rejection; the rest is beyond."""


def observed(acceptance, num_drafts=3, fan_out=4, count=4000):
    """Return statistics of rounds of a draft model with known acceptance and ranks."""
    generator, statistics = random.Random(3), OutcomeStatistics()
    for _ in range(count):
        accepted = 0
        while accepted < num_drafts and generator.random() < acceptance:
            accepted += 1
        ranks = (acceptance, *(each * (1 - acceptance) for each in RANKS))
        chances = ranks if accepted == num_drafts else RANKS
        [rank] = generator.choices(range(len(chances) + 1), (*chances, 1 - sum(chances)))
        listed = rank if rank < fan_out else None
        statistics.observe(num_drafts, accepted, listed, fan_out)
    return statistics


def test_hit_rates_are_those_of_the_draft_model():
    statistics = observed(0.8)
    rejected, whole = 1 - 0.8**3, 0.8**3
    assert statistics.hit_rate((1, 1, 1, 1)) == pytest.approx(
        rejected * 0.5 + whole * 0.8, abs=0.03
    )
    assert statistics.hit_rate((2, 2, 2, 1)) == pytest.approx(
        rejected * 0.7 + whole * 0.8, abs=0.03
    )
    assert statistics.hit_rate((0, 0, 0, 1)) == pytest.approx(whole * 0.8, abs=0.03)


def test_ranks_beyond_those_that_were_tried_are_no_evidence_against_them():
    """With a fan-out of 1 nothing is known about the second rank but its prior."""
    narrow, wide = observed(0.8, fan_out=1), observed(0.8, fan_out=4)
    assert narrow.hit_rate((1, 1, 1, 1)) == pytest.approx(wide.hit_rate((1, 1, 1, 1)), abs=0.03)
    assert narrow.hit_rate((4, 4, 4, 4)) > narrow.hit_rate((1, 1, 1, 1)) + 0.1


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.95])
@pytest.mark.parametrize("num_branches", [1, 3, 6, 10])
def test_the_fan_out_has_the_highest_hit_rate_of_its_size(acceptance, num_branches):
    statistics = observed(acceptance)
    found = statistics.fan_out(3, num_branches)
    assert sum(found) == num_branches
    assert found[3] >= 1, "the token behind all drafts is always continued"
    for source in range(4):
        for target in range(4):
            other = list(found)
            other[source] -= 1
            other[target] += 1
            if source != target and min(other) >= 0 and other[3] >= 1:
                assert statistics.hit_rate(other) <= statistics.hit_rate(found) + 1e-9


def test_a_draft_model_that_is_always_right_needs_no_other_branches():
    assert observed(1.0).fan_out(3, 12) == (0, 0, 0, 1)


def test_the_seconds_of_a_pass_are_a_line():
    speed = PassSpeed()
    assert speed.seconds(8) is None
    for num_tokens in (4, 8, 40, 16, 80):
        speed.observe(DraftPass(num_tokens, 0.01 + 0.0005 * num_tokens))
    assert speed.seconds(20) == pytest.approx(0.02)
    assert speed.seconds(200) == pytest.approx(0.11)


def test_a_pass_of_more_tokens_is_never_expected_to_be_shorter():
    speed = PassSpeed()
    for num_tokens in (4, 8, 16):
        speed.observe(DraftPass(num_tokens, 1.0 / num_tokens))
    assert speed.seconds(100) == speed.seconds(4)


def timed(pass_s, row_s, target_s):
    """Return a planner that has observed the speeds of both devices."""
    clock = Clock()
    planner = OutcomePlanner(clock)
    planner.begin_step()
    clock.now_s += target_s
    planner.end_step()
    for num_tokens in (1, 10, 100):
        planner.speed.observe(DraftPass(num_tokens, pass_s + row_s * num_tokens))
    return planner


def test_a_step_that_is_lost_is_no_step():
    clock = Clock()
    planner = OutcomePlanner(clock)
    for seconds, is_lost in ((1.0, False), (60.0, True)):
        planner.begin_step()
        clock.now_s += seconds
        planner.end_step(is_lost=is_lost)
    clock.now_s += 60.0
    planner.end_step()  # of a step behind which nothing was drafted
    assert planner._target_s == 1.0


@pytest.mark.parametrize("num_rows", [1, 4, 16])
@pytest.mark.parametrize(("pass_s", "row_s"), [(0.1, 0.0), (0.05, 0.002), (0.2, 0.001)])
def test_the_passes_end_within_a_step_of_the_target(num_rows, pass_s, row_s):
    planner = timed(pass_s, row_s, target_s=1.0)
    plans = planner.plan([(3, 4)] * num_rows, DraftAhead.OUTCOMES)
    levels = max(each.num_draft_tokens for each in plans)
    tokens = sum(sum(each.fan_out) for each in plans)
    seconds = pass_s + row_s * 4 * num_rows + levels * (pass_s + row_s * tokens)
    assert seconds <= 1.0 or (levels, tokens) == (1, num_rows)
    assert all(each.num_nodes <= MAX_TREE_NODES for each in plans)


def test_a_slow_draft_model_continues_one_outcome_by_a_token():
    planner = timed(0.6, 0.0, target_s=1.0)
    assert planner.plan([(3, 4)], DraftAhead.OUTCOMES) == [RowPlan((0, 0, 0, 1), 1)]


def test_continuing_has_one_chain_a_row():
    planner = timed(0.01, 0.0, target_s=1.0)
    plans = planner.plan([(3, 4), (0, 2)], DraftAhead.CONTINUING)
    assert plans == [RowPlan((0, 0, 0, 1), 4), RowPlan((1,), 2)]


def test_a_plan_without_room_becomes_one_chain():
    plan = RowPlan((2, 1, 1), 3)
    assert plan.num_nodes == 2 + 4 * 3
    assert plan.within(14) is plan
    assert plan.within(13) == RowPlan((0, 0, 1), 3)
    assert plan.within(4) == RowPlan((0, 0, 1), 2)
    assert plan.within(2) is None
