"""The policy on the costs of an H100: many sequences, a few steps, and a profile that may be wrong.

A drafted step of 256 sequences that should have had no drafts costs as much as two others.
"""

import pytest

from specdec.speculation.policy.cost_model import range_of
from tests.specdec.speculation.policy.synthetic_gpu import GpuCosts, GpuService

COSTS = GpuCosts()
SIZES = (1, 16, 64, 128, 256)
NUM_STEPS = 30
TRUE = COSTS.table()
OPTIMISTIC = COSTS.table(seen=0.6, added_row_ms=0.01)
"""A profile in favour of drafts."""
BLIND = COSTS.table(seen=0.0)
"""A profile that sees no host."""


def service(table=TRUE):
    return GpuService(COSTS, table)


@pytest.mark.parametrize("num_decoding", SIZES)
def test_from_the_first_step_it_is_as_fast_as_off_and_soon_as_the_best_number(num_decoding):
    cold = service()
    assert cold.run(num_decoding, NUM_STEPS).over_off >= 0.98
    assert cold.run(num_decoding, 200).over_best >= 0.97


@pytest.mark.parametrize("sizes", [(16, 256, 16, 128, 64, 256), (256, 64, 128, 1, 256)])
def test_after_a_change_of_the_batch_it_is_as_fast_as_off_at_once_and_soon_as_the_best(sizes):
    changing = service()
    for num_decoding in sizes:
        assert changing.run(num_decoding, NUM_STEPS).over_off >= 0.98, num_decoding
        changing.run(num_decoding, 100)
        assert changing.run(num_decoding, NUM_STEPS).over_best >= 0.93, num_decoding


@pytest.mark.parametrize("num_decoding", [128, 192])
def test_drafts_that_cost_more_than_profiled_are_left_within_a_few_steps(num_decoding):
    """Slow drafts are not counted as a slow machine."""
    misled = service(OPTIMISTIC)
    first = misled.run(num_decoding, NUM_STEPS)
    assert sum(first.chosen.values()) - first.chosen[0] <= 3
    assert first.over_off >= 0.96
    assert misled.run(num_decoding, 300).over_off >= 0.98


@pytest.mark.parametrize("sizes", [(107, 109), (152, 154), (215, 217), (127, 129, 155)])
def test_drafts_that_lose_are_left_though_the_batch_changes_its_range_in_each_step(sizes):
    """A batch around a boundary of two ranges is checked as early as one within a range."""
    assert len({range_of(size) for size in sizes}) == 2
    misled = service(BLIND)
    assert misled.run_in_turn(sizes, 300 // len(sizes)).over_off >= 0.97
    assert misled.run_in_turn(sizes, NUM_STEPS).over_off >= 0.98


def test_drafts_that_pay_go_on_after_the_steps_that_check_it():
    """For 64 sequences they gain a third, less than the profile promises."""
    misled = service(BLIND)
    window = misled.run(64, NUM_STEPS)
    assert window.chosen[0] <= 3
    assert window.over_off >= 1.2
    assert misled.run(64, 300).over_best >= 0.95


def test_a_batch_size_is_checked_once():
    known = service(OPTIMISTIC)
    for num_decoding in (64, 192, 64):
        window = known.run(num_decoding, 200)
    assert window.over_off >= 1.35
    assert known.run(192, NUM_STEPS).over_off >= 0.98
