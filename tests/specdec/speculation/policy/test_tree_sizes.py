"""Tests of the choice among chains and trees of several sizes, by measured cost and acceptance."""

import random
from collections import Counter

import pytest

from specdec.speculation.policy.acceptance import AcceptanceEstimator
from specdec.speculation.policy.cost_model import CostModel
from specdec.speculation.policy.cost_table import CostTable
from specdec.speculation.policy.expected_goodput import StepTiming
from specdec.speculation.policy.goodput import GoodputChooser
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.types.control import SpeculationControl
from specdec.types.drafts.draft_decision import (
    chain,
    chains,
    tree,
    trees,
)
from tests.clock import Clock

TREE = tree(16, depth=4)
SHAPES = (*chains(4), TREE)


@pytest.fixture
def clock():
    return Clock()


def run_with_trees(clock, row_s, rates, seconds):
    """Run one sequence; rates: of chains and of trees at each depth. Return steps by shape."""
    table = CostTable((1,), (0, 4, 16), ((0.01, 0.01 + 4 * row_s, 0.01 + 16 * row_s),))
    return run_shapes(clock, table, SHAPES, lambda shape: rates[shape.is_tree], seconds)[0]


def run_shapes(clock, table, shapes, rate_of, seconds, num_decoding=1):
    """Run sequences; return the steps by shape, and the tokens per second.

    rate_of: returns the acceptance rate of a shape at each depth. A draft is accepted to the depth
    at which a fixed sequence of numbers first exceeds the rate.
    """
    chooser, generator, steps = GoodputChooser(CostModel(table)), random.Random(2), Counter()
    begin_s, num_tokens = clock(), 0
    while clock() < begin_s + seconds:
        shape = chooser.choose(clock(), num_decoding, shapes).shape
        step_s = table.step_s(num_decoding, shape.num_draft_tokens)
        clock.now_s += step_s
        for _ in range(num_decoding):
            accepted, size = 0, shape.num_draft_tokens if shape.is_tree else 0
            while accepted < shape.depth and generator.random() < rate_of(shape):
                accepted += 1
            num_tokens += 1 + accepted
            if shape.depth:
                chooser.observe_drafts(shape.depth, accepted, clock(), size)
        chooser.observe_step(num_decoding, shape, StepTiming(clock(), step_s))
        steps[shape] += 1
    return steps, num_tokens / (clock() - begin_s)


def test_a_smaller_tree_is_used_where_rows_of_the_whole_one_cost_too_much(clock):
    """Eight sequences of a recorded EAGLE-3 head, on four times the costs of an H100."""
    rates = {tree(7, 4): 0.737, tree(15, 4): 0.777, tree(32, 4): 0.791}
    table = CostTable((8,), (0, 4, 7, 15, 32), ((0.026, 0.0324, 0.0332, 0.0364, 0.0476),))

    def run(shapes):
        return run_shapes(clock, table, shapes, lambda each: rates.get(each, 0.693), 120, 8)

    steps, found = run((*chains(4), *trees(32, 4)))
    assert steps[tree(7, 4)] + steps[tree(15, 4)] > 0.7 * steps.total()
    assert found > 1.04 * run((*chains(4), tree(32, 4)))[1]


def test_a_tree_that_pays_is_found_and_used(clock):
    """Rows are nearly free, and a tree is right twice as often."""
    steps = run_with_trees(clock, 0.00002, (0.4, 0.85), 120)
    assert steps[TREE] > 0.7 * sum(steps.values())


@pytest.mark.parametrize(
    ("row_s", "rates"),
    [
        pytest.param(0.002, (0.6, 0.8), id="its rows cost too much"),
        pytest.param(0.0002, (0.6, 0.6), id="it accepts no more than its best chain"),
    ],
)
def test_a_tree_that_does_not_pay_is_only_probed(clock, row_s, rates):
    steps = run_with_trees(clock, row_s, rates, 120)
    assert 0 < steps.get(TREE, 0) < 0.1 * sum(steps.values())


def test_a_tree_is_expected_to_accept_what_a_chain_does_until_it_was_tried(clock):
    acceptance = AcceptanceEstimator()
    for _ in range(50):
        acceptance.record(4, 2, clock())
    chain_tokens, tree_tokens = acceptance.expected_tokens([chain(4), TREE], clock())
    assert tree_tokens == pytest.approx(chain_tokens, rel=0.02)
    for _ in range(50):
        acceptance.record(4, 4, clock(), TREE.num_draft_tokens)
    [higher] = acceptance.expected_tokens([TREE], clock())
    assert higher > 1.3 * tree_tokens
    assert acceptance.expected_tokens([chain(4)], clock()) == [chain_tokens]


def test_a_smaller_tree_is_expected_between_chain_and_larger_tree_until_it_was_tried(clock):
    acceptance, (large, small) = AcceptanceEstimator(), trees(16, 4)
    for _ in range(50):
        acceptance.record(4, 1, clock())
        acceptance.record(4, 4, clock(), large.num_draft_tokens)
    of_chain, of_small, of_large = acceptance.expected_tokens([chain(4), small, large], clock())
    assert 1.1 * of_chain < of_small < 0.9 * of_large
    assert acceptance.expected_tokens([small], clock()) == [of_small]
    for _ in range(50):
        acceptance.record(4, 0, clock(), small.num_draft_tokens)
    assert acceptance.expected_tokens([small], clock())[0] < of_chain
    assert acceptance.expected_tokens([large], clock()) == [of_large]


def test_trees_of_a_step_are_observed_by_their_size(clock):
    chooser = GoodputChooser(CostModel(CostTable((1,), (0, 3), ((0.1, 0.1),))))
    policy = SpeculationPolicy(
        SpeculationControl("auto", 6, 3), clock, choosers={None: chooser}, num_tree_tokens=16
    )
    large, small = trees(16, depth=3)
    policy.decide(1)
    policy.begin_step(50, 50, has_prefill=False)
    policy._shape = small  # of the step that is observed
    policy.observe_rows(50, 3, 3, 3, is_tree=True)
    policy._shape = large
    policy.observe_rows(50, 3, 3, 0, is_tree=True)
    estimates = chooser._acceptance.expected_tokens([chain(3), small, large], clock())
    assert estimates[1] > 2 * estimates[2]
    for shape in (chain(0), small):  # under which the trees of an earlier decision are verified
        policy.decide(1)
        policy._shape = shape
        policy.observe_rows(50, 3, 3, 0, is_tree=True)
        found = chooser._acceptance.expected_tokens([chain(3), small, large], clock())
        assert found == estimates
