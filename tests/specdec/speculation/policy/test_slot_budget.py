"""Tests of the division of a step's slots, alone and in a simulated service with lookups."""

import pytest

from specdec.speculation.policy.slot_budget import SlotBudget
from specdec.types.drafts.draft_decision import chain, chains, tree
from specdec.types.drafts.draft_survival import AcceptanceHistory
from tests.specdec.speculation.policy.synthetic_service import (
    Clock,
    CostCurve,
    SyntheticService,
    auto_policy,
)

MAX_DRAFT_TOKENS = 7
RATES = {
    "5.04 of 7": (0.574, 0.724, 0.874, 0.954, 0.98),
    "2.49 of 3": (0.415, 0.565, 0.715, 0.795, 0.855),
    "alike": (0.7,),
}
"""Acceptance rates of a load's sequences, by their mean acceptance length."""

GOOD, BAD = AcceptanceHistory(100.0, 90.0), AcceptanceHistory(100.0, 10.0)
TOKENS = {shape: 1.0 + 0.5 * shape.depth for shape in (*chains(4), tree(8, 4))}


def renewed(histories, row_s):
    """Return a budget that has observed the sequences for a while. row_s: beside a second."""
    budget = SlotBudget()
    for now_s in range(30):
        budget.observe(histories)
        budget.renew(
            now_s,
            len(histories),
            TOKENS,
            lambda shape, rows: 1.0 + row_s * (shape.num_draft_tokens if rows is None else rows),
        )
    return budget


def test_where_rows_cost_time_slots_that_rarely_survive_are_left_out():
    plan = renewed([GOOD, BAD] * 4, 0.2).plan(chain(4))
    assert [plan.rule.length(each, 4) for each in (GOOD, BAD)] == [4, 0]
    assert plan.num_rows == 2
    assert plan.num_accepted < TOKENS[chain(4)] - 1


@pytest.mark.parametrize(
    ("histories", "row_s"),
    [([GOOD, BAD] * 4, 0.0), ([GOOD] * 8, 0.2), ([GOOD, BAD], 0.2), ([], 0.2)],
    ids=["rows are free", "alike", "few", "none"],
)
def test_otherwise_all_slots_are_drafted(histories, row_s):
    budget = renewed(histories, row_s)
    assert all(budget.apply(shape) is None for shape in TOKENS)


def test_trees_are_not_divided():
    assert renewed([GOOD, BAD] * 4, 0.2).plan(tree(8, 4)) is None


def test_plans_are_renewed_every_second_and_for_another_range_of_batch_sizes():
    budget = renewed([GOOD, BAD] * 4, 0.2)
    assert not budget.is_due(29.9, 8)
    assert budget.is_due(30.0, 8)
    assert not budget.is_due(29.05, 16)
    assert budget.is_due(29.2, 16)


@pytest.mark.parametrize(
    ("acceptance", "num_streams", "least", "num_steps"),
    [
        ("5.04 of 7", 16, 1.03, 1000),
        ("alike", 8, 0.99, 600),
        *(
            pytest.param(acceptance, count, 0.985, 800, marks=pytest.mark.slow)
            for acceptance in ("5.04 of 7", "2.49 of 3")
            for count in (1, 8, 32, 64, 128)
        ),
    ],
)
def test_lookups_gain_where_sequences_differ_and_never_lose(
    acceptance, num_streams, least, num_steps
):
    """Over equal lengths, in a service with the same random results."""
    costs = CostCurve(weights_s=0.010, row_s=0.0002, draft_s=0.0)
    kinds = [(rate,) * MAX_DRAFT_TOKENS for rate in RATES[acceptance]]
    goodputs = []
    for divides_slots in (True, False):
        clock = Clock()
        service = SyntheticService(costs, kinds[0], clock, others=kinds[1:])
        table = costs.table(MAX_DRAFT_TOKENS)
        policy = auto_policy(clock, table, MAX_DRAFT_TOKENS, divides_slots=divides_slots)
        for _ in range(num_steps):
            service.step(policy, num_streams)
        before = service.expected_tokens, service.expected_s
        for _ in range(num_steps):
            service.step(policy, num_streams)
        num_tokens, seconds = service.expected_tokens - before[0], service.expected_s - before[1]
        goodputs.append(num_tokens / seconds)
    assert goodputs[0] >= least * goodputs[1]
