# Modules: specdec.speculation.policy.cost_table
"""Tests of the cost table and its correction by measured steps."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.speculation.policy.cost_model import CostModel
from specdec.speculation.policy.cost_table import CostTable
from specdec.types.drafts.draft_decision import DraftAhead, chain
from specdec.types.errors import InvalidValueError

TABLE = CostTable((1, 4, 16), (0, 2), ((0.01, 0.02), (0.02, 0.03), (0.08, 0.15)))


@pytest.mark.parametrize(
    ("num_decoding", "num_draft_tokens", "expected_s"),
    [(1, 0, 0.01), (4, 2, 0.03), (1, 1, 0.015), (10, 0, 0.05), (28, 2, 0.2625), (16, 4, 0.25)],
)
def test_costs_are_interpolated_and_beyond_the_table_proportional_to_rows(
    num_decoding, num_draft_tokens, expected_s
):
    assert TABLE.step_s(num_decoding, num_draft_tokens) == pytest.approx(expected_s)


SECONDS = st.floats(1e-4, 1.0)


@given(st.lists(st.lists(SECONDS, min_size=3, max_size=3), min_size=3, max_size=3))
def test_a_larger_step_is_never_cheaper(seconds):
    table = CostTable((1, 3, 9), (0, 1, 4), tuple(map(tuple, seconds)))
    for size in range(1, 13):
        for count in range(6):
            assert table.step_s(size + 1, count) >= table.step_s(size, count) * (1 - 1e-9)
            assert table.step_s(size, count + 1) >= table.step_s(size, count) * (1 - 1e-9)


def test_a_measurement_that_other_load_made_longer_does_not_make_larger_steps_dear():
    table = CostTable((1, 4), (0, 1, 2), ((0.05, 0.02, 0.03), (0.03, 0.09, 0.04)))
    assert table.seconds == ((0.02, 0.02, 0.03), (0.03, 0.04, 0.04))


@pytest.mark.parametrize(
    ("values", "field"),
    [
        (((1, 1), (0,), ((0.1,), (0.1,))), "batch_sizes"),
        (((1,), (2, 0), ((0.1, 0.1),)), "draft_tokens"),
        (((1,), (0,), ((0.0,),)), "seconds"),
        (((1,), (0,), ((math.inf,),)), "seconds"),
        (((1, 2), (0,), ((0.1,),)), "seconds"),
    ],
)
def test_an_invalid_table_is_rejected(values, field):
    with pytest.raises(InvalidValueError) as caught:
        CostTable(*values)
    assert caught.value.field == field


def test_measured_steps_correct_the_table():
    costs = CostModel(TABLE)
    for _ in range(25):
        costs.observe(4, chain(2), 0.06, 0.0)
    assert costs.step_s(4, chain(2), 0.0) == pytest.approx(0.06)
    assert costs.step_s(16, chain(2), 0.0) == pytest.approx(0.30), (
        "the correction of the nearest measured range applies"
    )


def test_outliers_hardly_change_the_estimate():
    costs = CostModel(TABLE)
    for slow in (1, 5, 9, 14):  # one in each median
        for index in range(slow - 4, slow + 1):
            costs.observe(1, chain(0), 10.0 if index == slow else 0.01, 0.0)
    assert costs.step_s(1, chain(0), 0.0) == pytest.approx(0.01)
    for _ in range(5):
        costs.observe(1, chain(0), 10.0, 0.0)
    assert costs.step_s(1, chain(0), 0.0) < 0.01 * 4


def test_a_correction_also_applies_to_shapes_without_measurements():
    costs = CostModel(TABLE)
    for _ in range(5):
        costs.observe(4, chain(2), 0.06, 0.0)
    assert costs.step_s(4, chain(0), 0.0) == pytest.approx(0.04)


def ratio_of_drafts(costs, now_s):
    return costs.step_s(4, chain(2), now_s) / costs.step_s(4, chain(0), now_s)


def test_a_slower_machine_does_not_change_the_best_shape():
    costs = CostModel(TABLE)
    for count, seconds in ((0, 0.02), (2, 0.03)) * 20:
        for _ in range(5):
            costs.observe(4, chain(count), seconds, 0.0)
    for seconds in (0.02, 0.06):  # three times as slow, while only steps without drafts run
        for _ in range(10):
            costs.observe(4, chain(0), seconds, 0.0)
    assert costs.step_s(4, chain(0), 0.0) > 0.04
    assert ratio_of_drafts(costs, 0.0) > 1.0, "drafts do not look free"
    for _ in range(50):
        costs.observe(4, chain(0), 0.06, 0.0)
        costs.observe(4, chain(2), 0.09, 0.0)
    assert ratio_of_drafts(costs, 0.0) == pytest.approx(1.5, rel=0.1)


def test_samples_of_another_time_are_dropped():
    costs = CostModel(TABLE)
    for _ in range(5):
        costs.observe(4, chain(0), 0.02, 0.0)
    for _ in range(2):
        costs.observe(4, chain(2), 0.09, 0.0)  # the machine was slow for a moment
    costs.observe(4, chain(2), 0.03, 60.0)
    assert ratio_of_drafts(costs, 60.0) == pytest.approx(1.5)
    for _ in range(2):
        costs.observe(4, chain(2), 0.06, 60.0)
    assert ratio_of_drafts(costs, 60.0) > 2.0, "three of the same time count"


def test_what_a_shape_costs_beyond_the_others_is_forgotten():
    costs = CostModel(TABLE)
    for _ in range(100):
        costs.observe(4, chain(0), 0.02, 0.0)
        costs.observe(4, chain(2), 0.12, 0.0)
    assert ratio_of_drafts(costs, 0.0) == pytest.approx(6.0, rel=0.05)
    assert ratio_of_drafts(costs, 600.0) == pytest.approx(3.0, rel=0.05)
    assert ratio_of_drafts(costs, 18000.0) == pytest.approx(1.5, rel=0.05)


@pytest.mark.parametrize("factor", [1.6, 5.0])
def test_the_seconds_of_a_draft_model_correct_what_every_length_takes_to_draft(factor):
    table = CostTable((4,), (0, 4), ((0.02, 0.06),))
    drafting = CostTable((4,), (1, 4), ((0.01, 0.04),))
    costs = CostModel(table, drafting=drafting)
    for index in range(400):
        count = 2 * (index // 20 % 2)
        drafted_s = factor * 0.02 if count else 0.0
        costs.observe(4, chain(count), 0.02 + drafted_s, 0.01 * index, drafted_s=drafted_s)
    assert costs.step_s(4, chain(0), 4.0) == pytest.approx(0.02, rel=0.05)
    assert costs.profile_error(4, chain(0), 4.0) == pytest.approx(1.0, rel=0.05)
    assert costs.step_s(4, chain(2), 4.0) == pytest.approx(0.02 + factor * 0.02, rel=0.05)
    assert costs.step_s(4, chain(4), 4.0) == pytest.approx(0.02 + factor * 0.04, rel=0.15)


def test_the_error_of_the_profile_is_what_steps_take_over_it():
    costs = CostModel(TABLE)
    assert costs.profile_error(4, chain(2), 0.0) is None
    for count, seconds in ((0, 0.02), (2, 0.0486)):
        for _ in range(20):
            costs.observe(4, chain(count), seconds, 0.0)
        assert costs.profile_error(4, chain(0), 0.0) == pytest.approx(1.0, rel=0.3)
    assert costs.profile_error(4, chain(2), 0.0) == pytest.approx(1.62, rel=0.01)
    for _ in range(200):
        costs.observe(4, chain(2), 1000.0, 0.0)
    assert costs.profile_error(4, chain(2), 0.0) < 16**2, "corrections are bounded"


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_shape_that_goes_on_is_compared_only_where_it_follows_another(noise):
    """Drafts take twice what the table has; the machine is as profiled."""
    costs, generator = CostModel(TABLE), random.Random(0)
    for index in range(2000):
        count = 0 if index % 100 < 6 else 2  # probes
        seconds = (0.02 if count == 0 else 0.06) * (1 + noise * generator.uniform(-1, 1))
        costs.observe(4, chain(count), seconds, 0.05 * index)
    assert costs.step_s(4, chain(0), 100.0) == pytest.approx(0.02, rel=0.05)
    assert costs.step_s(4, chain(2), 100.0) == pytest.approx(0.06, rel=0.05)


def test_a_pass_costs_as_much_as_the_cheapest_step_of_as_many_tokens_or_more():
    table = CostTable((1, 4, 16), (0, 3), ((1.0, 1.6), (1.2, 4.0), (3.2, 12.8)))
    expected = {1: 1.0, 4: 1.2, 10: 2.2, 16: 3.2, 40: 8.0, 64: 12.8, 128: 25.6}
    assert {count: table.pass_s(count) for count in expected} == pytest.approx(expected)


def test_prompts_lengthen_a_step_by_the_rows_after_its_drafts():
    """Up to four rows are free, and each other one takes a second on a machine twice as slow."""
    costs = CostModel(CostTable((1, 4, 8), (0,), ((1.0,), (1.0,), (3.0,))))
    assert costs.prompt_s(1, 0, 3, 0.0) == 0.0
    assert costs.prompt_s(1, 3, 3, 0.0) == pytest.approx(1.5)
    for _ in range(25):
        costs.observe(1, chain(0), 2.0, 0.0)
    assert costs.prompt_s(1, 3, 3, 0.0) == pytest.approx(3.0)


def test_a_table_is_described_in_one_line():
    table = CostTable((1, 8), (0, 2), ((0.01, 0.0125), (0.02, 0.03)))
    text = "batch 1: 0 drafts 10.0, 2 drafts 12.5; batch 8: 0 drafts 20.0, 2 drafts 30.0"
    assert table.describe() == text


@pytest.mark.parametrize(
    ("verification", "num_rows", "seconds"),
    [(None, 4, 0.06), (None, 2, 0.04), (((0.02, 0.03),), 4, 0.06), (((0.02, 0.03),), 0, 0.05)],
    ids=["lookups, all", "lookups, half", "a model, all", "a model, none"],
)
def test_rows_that_are_left_out_save_no_drafting(verification, num_rows, seconds):
    counts = (0, 4)
    plain = verification and CostTable((4,), counts, verification)
    costs = CostModel(CostTable((4,), counts, ((0.02, 0.06),)), verification=plain)
    assert costs.step_s(4, chain(4), 0.0, num_rows) == pytest.approx(seconds)
    assert costs.step_s(4, chain(4), 0.0) == pytest.approx(0.06)


def test_steps_with_slots_left_out_are_corrected_apart():
    """They may take as long as the others, where a device pads rows to the longest."""
    costs = CostModel(CostTable((4,), (0, 4), ((0.02, 0.06),)))
    for index in range(200):
        num_rows = 2.0 if index // 20 % 2 else None
        costs.observe(4, chain(4), 0.06, 0.01 * index, num_rows=num_rows)
    assert costs.step_s(4, chain(4), 2.0) == pytest.approx(0.06, rel=0.05)
    assert costs.step_s(4, chain(4), 2.0, 2.0) == pytest.approx(0.06, rel=0.05)


def test_padded_steps_cost_as_much_as_equal_ones():
    """Rows save nothing, and what such steps take corrects those with equal lengths."""
    costs = CostModel(CostTable((4,), (0, 4), ((0.02, 0.06),)), most_padding_tokens=8)
    assert costs.step_s(4, chain(4), 0.0, 2.0) == pytest.approx(0.06)
    assert costs.step_s(4, chain(4), 0.0, 1.75) == pytest.approx(0.0375)
    for _ in range(5):
        costs.observe(4, chain(4), 0.06, 0.0, num_rows=3.0)
    assert costs.is_known(4, chain(4), 0.0)


@pytest.mark.parametrize(("num_rows", "other"), [(None, 1.5), (1.5, None), (2.0, None)])
def test_a_kind_of_steps_is_known_by_its_own(num_rows, other):
    """Also where a step that may leave out slots has all of them."""
    costs = CostModel(TABLE)
    for _ in range(5):
        costs.observe(4, chain(2), 0.03, 0.0, num_rows=num_rows)
    assert costs.is_known(4, chain(2), 0.0, num_rows)
    assert costs.is_observed(4, chain(2), num_rows)
    assert not costs.is_known(4, chain(2), 0.0, other)
    assert not costs.is_observed(4, chain(2), other)


@pytest.mark.parametrize("noise", [0.5, 0.9, 1.5, 3.0])
def test_rows_save_at_most_what_one_table_has_for_them(noise):
    """Whatever the other table has: both are noisy."""
    counts = (0, 4)
    verification = CostTable((4,), counts, ((noise * 0.02, noise * 0.05),))
    costs = CostModel(CostTable((4,), counts, ((0.02, 0.06),)), verification=verification)
    saved_s = 0.06 - costs.step_s(4, chain(4), 0.0, 2)
    assert 0.0 <= saved_s <= noise * 0.015 + 1e-9


def test_steps_with_drafts_ahead_cost_what_their_table_has():
    """Without one, drafts ahead are those of a method that makes others in the step."""
    whole, verification = (CostTable((4,), (0, 4), ((0.02, each),)) for each in (0.06, 0.03))
    ahead = chain(4).with_ahead(DraftAhead.CONTINUING)
    for costs, seconds in (
        (CostModel(whole, verification=verification), 0.06),
        (CostModel(whole, verification, verification=verification), 0.03),
    ):
        assert costs.step_s(4, ahead, 0.0) == pytest.approx(seconds)
