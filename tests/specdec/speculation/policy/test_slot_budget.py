"""Tests of the division of a step's slots, alone and in a simulated service."""

from dataclasses import asdict, dataclass, replace

import pytest

from specdec.speculation.policy.acceptance import AcceptanceEstimator
from specdec.speculation.policy.cost_model import CostModel
from specdec.speculation.policy.cost_table import CostTable
from specdec.speculation.policy.expected_goodput import ExpectedGoodput
from specdec.speculation.policy.slot_budget import SlotBudget, SlotPlan
from specdec.types.drafts.draft_decision import chain, chains, tree
from specdec.types.drafts.draft_survival import AcceptanceHistory
from specdec.types.drafts.slot_rule import SlotRule
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


def gain(costs, acceptance, num_streams, num_steps, curve=None, **device):
    """Return the goodput over that of equal lengths, in a service with the same random results.

    costs: as profiled. curve: of the service, if that is another one. device: see `auto_policy`.
    """
    kinds = [(rate,) * MAX_DRAFT_TOKENS for rate in RATES[acceptance]]
    tables = [each.table(MAX_DRAFT_TOKENS) for each in (costs, replace(costs, draft_s=0.0))]
    goodputs = []
    for divides_slots in (True, False):
        clock = Clock()
        service = SyntheticService(curve or costs, kinds[0], clock, others=kinds[1:])
        table, verification = tables
        device |= {"verification": verification, "divides_slots": divides_slots}
        policy = auto_policy(clock, table, MAX_DRAFT_TOKENS, **device)
        for _ in range(num_steps):
            service.step(policy, num_streams)
        before = service.expected_tokens, service.expected_s
        for _ in range(num_steps):
            service.step(policy, num_streams)
        num_tokens, seconds = service.expected_tokens - before[0], service.expected_s - before[1]
        goodputs.append(num_tokens / seconds)
    return goodputs[0] / goodputs[1]


@pytest.mark.parametrize(
    ("draft_s", "acceptance", "num_streams", "least", "num_steps"),
    [
        (0.0, "5.04 of 7", 16, 1.03, 1000),
        (0.0003, "5.04 of 7", 8, 1.03, 1000),
        (0.0008, "5.04 of 7", 8, 1.01, 1000),
        (0.0, "alike", 8, 0.995, 600),
        *(
            pytest.param(draft_s, acceptance, count, 0.985, 800, marks=pytest.mark.slow)
            for draft_s in (0.0, 0.0003, 0.0008)
            for acceptance in ("5.04 of 7", "2.49 of 3")
            for count in (1, 8, 16, 32, 64, 128)
        ),
    ],
)
def test_drafts_gain_where_sequences_differ_and_never_lose(
    draft_s, acceptance, num_streams, least, num_steps
):
    """draft_s: of a pass of what drafts: a lookup, a head, a draft model."""
    costs = CostCurve(weights_s=0.010, row_s=0.0002, draft_s=draft_s)
    assert gain(costs, acceptance, num_streams, num_steps) >= least


@dataclass(frozen=True)
class PaddedCurve(CostCurve):
    """Cost of steps whose rows are padded to the longest."""

    def step_s(self, num_decoding, num_draft_tokens, num_drafting=None, num_rows=None):
        return super().step_s(num_decoding, num_draft_tokens, num_drafting)


def test_where_rows_turn_out_to_cost_as_much_as_padding_lengths_are_equal():
    costs = CostCurve(weights_s=0.010, row_s=0.0002, draft_s=0.0003)
    padded = PaddedCurve(**asdict(costs))
    assert gain(costs, "5.04 of 7", 8, 1500, padded) >= 0.99


def test_a_device_that_pads_has_equal_lengths():
    costs = CostCurve(weights_s=0.010, row_s=0.0002, draft_s=0.0)
    load = "5.04 of 7", 16, 400
    assert gain(costs, *load, most_padding_tokens=16 * MAX_DRAFT_TOKENS) == 1.0
    assert gain(costs, *load) != 1.0


def test_evidence_is_of_the_slots_that_a_plan_has():
    """Steps of all slots do not make those known that leave out some."""
    costs = CostModel(CostTable((8,), (0, 4), ((0.01, 0.05),)))
    expected = ExpectedGoodput(AcceptanceEstimator(), costs)
    for _ in range(5):
        costs.observe(8, chain(4), 0.05, 0.0)
    assert expected.is_known(0.0, 8, chain(4))
    assert expected.is_observed(8, chain(4))
    rule = SlotRule(0.3, AcceptanceHistory(2.0, 1.0))
    expected.slots._plans[chain(4)] = SlotPlan(rule, 2.0, 1.0)
    assert not expected.is_known(0.0, 8, chain(4))
    assert not expected.is_observed(8, chain(4))
