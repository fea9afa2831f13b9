# Modules: specdec.speculation.policy.hysteresis
"""Tests of the threshold policy with a manually advanced clock."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.speculation.policy.cost_model import CostModel
from specdec.speculation.policy.cost_table import CostTable
from specdec.speculation.policy.goodput import GoodputChooser
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.types.control import SpeculationControl
from specdec.types.drafts.draft_decision import (
    Decision,
    DecisionReason,
    DraftShape,
    PromptLoad,
    chain,
)
from specdec.types.drafts.draft_length import LengthRule, LengthSchedule
from specdec.types.errors import InvalidValueError
from tests.clock import Clock

AUTO = SpeculationControl("auto", threshold=6, num_speculative_tokens=3)
ON = dataclasses.replace(AUTO, mode="on")
OFF = dataclasses.replace(AUTO, mode="off")


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def policy(clock):
    return SpeculationPolicy(AUTO, clock, hysteresis=2, dwell_s=1.0)


def steps(policy, clock, num_decoding, count=100, step_s=0.05):
    """Return the number of draft tokens of each of `count` steps."""
    counts = []
    for _ in range(count):
        clock.now_s += step_s
        counts.append(policy.decide(num_decoding).num_draft_tokens)
    return counts


def test_a_low_load_turns_it_on_and_a_high_load_off(policy, clock):
    settled = {load: steps(policy, clock, load)[-1] for load in (1, 4, 8, 16, 4, 1)}
    assert settled == {1: 3, 4: 3, 8: 0, 16: 0}
    assert policy.num_flips == 2
    assert policy.is_on


def test_the_threshold_itself_is_on(policy, clock):
    assert steps(policy, clock, 6) == [3] * 100
    assert policy.decide(7).num_draft_tokens == 0


def test_no_flapping_around_the_threshold(policy, clock):
    for _ in range(100):
        steps(policy, clock, 7, count=30)
        steps(policy, clock, 6, count=30)
    assert policy.num_flips == 1
    assert not policy.is_on


def test_it_turns_on_again_below_the_hysteresis_margin(policy, clock):
    steps(policy, clock, 8)
    assert steps(policy, clock, 5)[-1] == 0
    assert steps(policy, clock, 4)[-1] == 3


def test_it_turns_on_again_after_low_load_for_the_dwell_time(policy, clock):
    assert policy.decide(20).num_draft_tokens == 0
    assert steps(policy, clock, 1, count=20) == [0] * 20
    assert steps(policy, clock, 1, count=2)[-1] == 3


def test_a_short_dip_of_the_load_does_not_turn_it_on(policy, clock):
    """Requests of equal length that end together, followed by as many, cause such a dip."""
    for _ in range(50):
        assert steps(policy, clock, 8, count=30) == [0] * 30
        assert steps(policy, clock, 1, count=10) == [0] * 10
    assert policy.num_flips == 1


def test_it_stays_on_for_the_dwell(policy, clock):
    steps(policy, clock, 8)
    while policy.decide(1).num_draft_tokens == 0:
        clock.now_s += 0.05
    assert steps(policy, clock, 8, count=18) == [3] * 18
    assert steps(policy, clock, 8, count=4)[-1] == 0


def test_steps_without_decoding_keep_the_state(policy, clock):
    steps(policy, clock, 8)
    assert steps(policy, clock, 0) == [0] * 100
    assert policy.num_flips == 1


@pytest.mark.parametrize(("threshold", "turns_on"), [(0, False), (1, True), (2, True)])
def test_a_low_threshold_still_turns_on_again(clock, threshold, turns_on):
    control = SpeculationControl("auto", threshold, num_speculative_tokens=3)
    policy = SpeculationPolicy(control, clock, hysteresis=5, dwell_s=1.0)
    assert steps(policy, clock, threshold + 1)[-1] == 0
    assert (steps(policy, clock, 1)[-1] > 0) == turns_on


def test_an_operators_control_applies_at_the_next_step_despite_the_dwell(policy):
    assert policy.decide(7).num_draft_tokens == 0
    for control, expected in ((ON, 3), (OFF, 0), (ON, 3), (AUTO, 0)):
        policy.update(control)
        assert policy.is_on == (expected > 0)
        assert policy.decide(7).num_draft_tokens == expected
    policy.update(dataclasses.replace(AUTO, threshold=7))
    assert policy.decide(7).num_draft_tokens == 3
    policy.update(AUTO)  # the threshold counts, not the margin below it
    assert policy.decide(6).num_draft_tokens == 3
    policy.update(dataclasses.replace(AUTO, num_speculative_tokens=5))
    assert policy.decide(6).num_draft_tokens == 5


def test_the_first_step_after_a_change_depends_only_on_its_own_load(policy):
    policy.decide(1)
    policy.update(ON)
    policy.update(AUTO)
    assert policy.is_on
    assert policy.decide(8).num_draft_tokens == 0
    policy.update(OFF)
    policy.update(AUTO)
    assert policy.decide(2).num_draft_tokens == 3


def test_the_same_control_again_restarts_nothing(policy):
    assert policy.decide(7).num_draft_tokens == 0
    policy.update(dataclasses.replace(AUTO))
    assert policy.decide(5).num_draft_tokens == 0
    assert policy.num_flips == 1


def test_no_draft_tokens_is_off(clock):
    policy = SpeculationPolicy(dataclasses.replace(ON, num_speculative_tokens=0), clock)
    assert policy.decide(1).num_draft_tokens == 0
    assert not policy.is_on


@pytest.mark.parametrize("mode", ["on", "off"])
def test_a_fixed_mode_ignores_the_load(clock, mode):
    policy = SpeculationPolicy(dataclasses.replace(AUTO, mode=mode), clock)
    num_draft_tokens = {policy.decide(load).num_draft_tokens for load in (1, 100, 1, 7)}
    assert num_draft_tokens == ({3} if mode == "on" else {0})
    assert policy.num_flips == 0


LOADS = st.lists(st.tuples(st.floats(0, 3), st.integers(0, 20)), max_size=60)


@given(loads=LOADS, threshold=st.integers(0, 15), hysteresis=st.integers(0, 8))
def test_flips_are_a_dwell_apart_and_follow_the_threshold_at_any_load(loads, threshold, hysteresis):
    clock, dwell_s = Clock(), 1.0
    control = SpeculationControl("auto", threshold, num_speculative_tokens=3)
    policy = SpeculationPolicy(control, clock, hysteresis=hysteresis, dwell_s=dwell_s)
    flipped_at_s, was_on, num_flips = None, True, 0
    for elapsed_s, num_decoding in loads:
        clock.now_s += elapsed_s
        count = policy.decide(num_decoding).num_draft_tokens
        assert count == (3 if policy.is_on else 0)
        if policy.is_on != was_on:
            assert flipped_at_s is None or clock.now_s - flipped_at_s >= dwell_s
            assert num_decoding <= threshold if policy.is_on else num_decoding > threshold
            flipped_at_s, was_on, num_flips = clock.now_s, policy.is_on, num_flips + 1
    assert policy.num_flips == num_flips


@given(loads=LOADS, load=st.integers(1, 20), threshold=st.integers(0, 15))
def test_a_constant_load_settles_by_the_threshold(loads, load, threshold):
    clock = Clock()
    control = SpeculationControl("auto", threshold, num_speculative_tokens=3)
    policy = SpeculationPolicy(control, clock, hysteresis=2, dwell_s=1.0)
    for elapsed_s, num_decoding in loads:
        clock.now_s += elapsed_s
        policy.decide(num_decoding)
    last = steps(policy, clock, load, count=25)[-1]
    if load > threshold:
        assert last == 0
    elif load <= threshold - 2:
        assert last == 3


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("mode", "maybe", "one of auto, on, off"),
        ("threshold", -1, "a whole number from 0 to 4096"),
        ("threshold", True, "a whole number from 0 to 4096"),
        ("num_speculative_tokens", 33, "a whole number from 0 to 32"),
    ],
)
def test_an_error_names_the_field_that_is_out_of_range(field, value, limit):
    with pytest.raises(InvalidValueError) as caught:
        dataclasses.replace(AUTO, **{field: value})
    assert (caught.value.field, caught.value.value, caught.value.limit) == (field, value, limit)


@pytest.mark.parametrize(
    "changes", [{"hysteresis": -1}, {"dwell_s": -0.5}, {"dwell_s": float("inf")}]
)
def test_a_policy_checks_its_settings(clock, changes):
    with pytest.raises(InvalidValueError) as caught:
        SpeculationPolicy(AUTO, clock, **changes)
    assert caught.value.field == next(iter(changes))


ROWS = LengthSchedule(((1, 2, 5), (3, 4, 1), (5, 9, 0)))


def test_a_table_applies_below_the_threshold_and_up_to_the_operators_number(clock):
    policy = SpeculationPolicy(AUTO, clock, schedule=ROWS)
    decided = [policy.decide(load) for load in (2, 3, 5, 7)]
    assert [each.num_draft_tokens for each in decided] == [3, 1, 0, 0]
    reasons = [DecisionReason.TABLE_ROW] * 3 + [DecisionReason.THRESHOLD]
    assert [each.reason for each in decided] == reasons
    assert not policy.is_on


@pytest.mark.parametrize(
    ("control", "reason"),
    [
        (ON, DecisionReason.OPERATOR),
        (OFF, DecisionReason.OPERATOR),
        (dataclasses.replace(OFF, is_by_rule=True), DecisionReason.RULE),
        (AUTO, DecisionReason.THRESHOLD),
    ],
)
def test_a_decision_reports_its_reason(clock, control, reason):
    assert SpeculationPolicy(control, clock).decide(2).reason is reason


def test_nothing_is_drafted_without_an_eligible_request_or_a_drafter(clock):
    is_available = True
    policy = SpeculationPolicy(AUTO, clock, is_drafter_available=lambda: is_available)
    assert policy.decide(2, num_eligible=0) == Decision(chain(0), DecisionReason.REQUEST)
    is_available = False
    assert policy.decide(2) == Decision(chain(0), DecisionReason.DRAFTER_UNAVAILABLE)
    policy.update(ON)
    assert policy.decide(2) == Decision(chain(0), DecisionReason.DRAFTER_UNAVAILABLE)
    is_available = True
    assert policy.decide(2).num_draft_tokens == 3


def test_steps_are_counted_by_reason_including_catch_up(clock):
    policy = SpeculationPolicy(AUTO, clock, catches_up=True)
    for num_drafted in (0, 0, 2):
        policy.decide(2)
        policy.begin_step(2, num_drafted, has_prefill=False)
    assert policy.log.counts == {DecisionReason.CATCHING_UP: 2, DecisionReason.THRESHOLD: 1}


class RecordingChooser(GoodputChooser):
    """A chooser of two draft tokens that records its observations."""

    def __init__(self):
        super().__init__(CostModel(CostTable((1,), (0,), ((1.0,),))))
        self.drafts, self.steps, self.asked_most = [], [], []

    def choose(self, now_s, num_decoding, shapes, prompts):
        self.asked_most.append(max(each.num_draft_tokens for each in shapes))
        return Decision(shapes[min(len(shapes) - 1, 2)], DecisionReason.GOODPUT)

    def observe_drafts(self, num_asked, num_accepted, now_s, tree_size=0, *, num_drafts=1):
        self.drafts += [(num_asked, num_accepted)] * num_drafts

    def observe_step(self, num_decoding, shape, timing, *, is_typical):
        if is_typical:
            self.steps.append((num_decoding, shape.num_draft_tokens, round(timing.seconds, 3)))


def one_step(policy, clock, rows, has_prefill=False):
    """Run a step; `rows`: requested, drafted and accepted tokens of each sequence."""
    policy.decide(len(rows))
    num_asked, num_drafted = (sum(row[i] > 0 for row in rows) for i in (0, 1))
    policy.begin_step(num_asked, num_drafted, has_prefill=has_prefill)
    clock.now_s += 0.1
    for row in rows:
        policy.observe_rows(1, *row)
    policy.end_step()


def test_the_chooser_observes_all_drafts_but_only_steps_without_prefill(clock):
    chooser = RecordingChooser()
    policy = SpeculationPolicy(AUTO, clock, choosers={None: chooser})
    one_step(policy, clock, [(3, 3, 1), (3, 0, 0), (0, 0, 0)])
    one_step(policy, clock, [(3, 3, 3)], has_prefill=True)
    assert chooser.drafts == [(3, 1), (3, 0), (3, 3)]
    assert chooser.steps == [(3, 2, 0.1)]


def test_missing_drafts_during_catch_up_are_not_counted_as_rejected(clock):
    chooser = RecordingChooser()
    policy = SpeculationPolicy(AUTO, clock, choosers={None: chooser}, catches_up=True)
    one_step(policy, clock, [(3, 0, 0), (3, 3, 2)])
    assert (chooser.drafts, chooser.steps) == ([(3, 2)], []), "nor is the step timed"
    for _ in range(8):
        one_step(policy, clock, [(3, 3, 2)])
    assert len(chooser.steps) == 8
    one_step(policy, clock, [(3, 0, 0)])
    assert chooser.drafts == [(3, 2)] * 9, "a second has not passed"
    clock.now_s += 1.0
    one_step(policy, clock, [(3, 0, 0)])
    assert chooser.drafts == [*[(3, 2)] * 9, (3, 0)]
    assert len(chooser.steps) == 9


@pytest.mark.parametrize(
    ("num_decoding", "is_lost"), [(1, True), (0, False)], ids=["lost", "a prompt of one token"]
)
def test_a_step_that_is_lost_or_decodes_nothing_is_not_timed(clock, num_decoding, is_lost):
    chooser = RecordingChooser()
    policy = SpeculationPolicy(AUTO, clock, choosers={None: chooser})
    policy.decide(num_decoding)
    policy.begin_step(1, 1, has_prefill=False)
    if is_lost:
        policy.forget_step()
    policy.end_step()
    assert chooser.steps == []
    assert bool(policy.log.counts) == is_lost


def test_goodput_is_bounded_by_threshold_number_and_budget(clock):
    chooser = RecordingChooser()
    control = SpeculationControl("auto", threshold=64, num_speculative_tokens=5)
    policy = SpeculationPolicy(control, clock, choosers={None: chooser}, max_num_batched_tokens=256)
    for load in (4, 32, 64, 65):
        policy.decide(load)
    assert chooser.asked_most == [5, 3, 1]
    assert policy.decision.reason is DecisionReason.THRESHOLD


def test_a_speedup_is_estimated_when_costs_are_known_and_a_sequence_decodes(clock):
    assert SpeculationPolicy(AUTO, clock).estimate is None
    chooser = GoodputChooser(CostModel(CostTable((1,), (0, 2), ((0.1, 0.1),))))
    policy = SpeculationPolicy(AUTO, clock, choosers={None: chooser})
    assert policy.estimate is None
    policy.decide(1)
    assert policy.estimate.speedup > 1.5, "two drafts at no cost"


def test_each_method_has_separate_estimates(clock):
    choosers = {None: RecordingChooser(), "ngram": RecordingChooser()}
    policy = SpeculationPolicy(AUTO, clock, choosers=choosers)
    policy.update(dataclasses.replace(AUTO, method="ngram"))
    one_step(policy, clock, [(3, 3, 1)])
    assert (choosers[None].drafts, choosers["ngram"].drafts) == ([], [(3, 1)])


@pytest.mark.parametrize(("mode", "threshold"), [("on", 32), ("auto", 32)])
def test_fixed_decisions_are_trees_of_the_configured_size(clock, mode, threshold):
    policy = SpeculationPolicy(SpeculationControl(mode, threshold, 4), clock, num_tree_tokens=12)
    assert policy.decide(2).shape == DraftShape(12, depth=4)
    policy.update(SpeculationControl(mode, threshold, 12))
    assert policy.decide(2).shape == chain(12)
    policy.update(SpeculationControl("off", threshold, 4))
    assert policy.decide(2).shape == chain(0)


@pytest.mark.parametrize(("is_fixed", "of_four"), [(False, 7), (True, 3)])
def test_goodput_has_trees_to_choose_where_the_budget_allows(clock, is_fixed, of_four):
    chooser = RecordingChooser()
    control = dataclasses.replace(AUTO, threshold=8)
    sizes = {"num_tree_tokens": 16, "has_fixed_trees": is_fixed, "max_num_batched_tokens": 100}
    policy = SpeculationPolicy(control, clock, choosers={None: chooser}, **sizes)
    for num_decoding in (1, 3, 4, 7):
        policy.decide(num_decoding)
    assert chooser.asked_most == [16, 16, of_four, AUTO.num_speculative_tokens]


PROMPTS = PromptLoad(8, 1)


def test_nothing_is_drafted_after_prompts_that_would_not_be_beside_decoding(clock):
    """An operator's 0 holds although adaptive lengths may be longer, and so does a lost drafter."""
    chooser = GoodputChooser(CostModel(CostTable((1,), (0, 3), ((0.1, 0.1),))))
    is_available = True
    policy = SpeculationPolicy(
        AUTO,
        clock,
        choosers={None: chooser},
        length_rule=LengthRule(max_tokens=3),
        is_drafter_available=lambda: is_available,
    )
    assert policy.decide(1).shape == policy.decide(0, 0, PROMPTS).shape == chain(3)
    is_available = False
    assert policy.decide(0, 0, PROMPTS) == Decision(chain(0), DecisionReason.DRAFTER_UNAVAILABLE)
    is_available = True
    policy.update(dataclasses.replace(AUTO, num_speculative_tokens=0))
    assert policy.decide(1).shape == policy.decide(0, 0, PROMPTS).shape == chain(0)
