# Modules: specdec.speculation.policy.expected_goodput, specdec.speculation.policy.reviews
# Modules: specdec.speculation.policy.inertia
"""Tests of the goodput policy on a synthetic target that advances the clock."""

import random
import time
from bisect import bisect_left
from dataclasses import replace
from itertools import pairwise, product

import pytest

from specdec.speculation.policy.cost_model import CostModel
from specdec.speculation.policy.cost_table import CostTable
from specdec.speculation.policy.expected_goodput import StepTiming
from specdec.speculation.policy.goodput import GoodputChooser
from specdec.types.drafts.draft_decision import DecisionReason, PromptLoad, chain, chains
from specdec.types.errors import InvalidValueError
from tests.clock import Clock
from tests.combinations import every_value
from tests.specdec.speculation.policy.synthetic_service import (
    CostCurve,
    SyntheticService,
    auto_policy,
    fixed_policy,
)

MOST = 5
GPU = CostCurve(weights_s=0.010, row_s=0.0001, draft_s=0.0008)
SMALL = CostCurve(weights_s=0.020, row_s=0.001, draft_s=0.002)
GOOD = (0.85, 0.8, 0.75, 0.7, 0.7)
BAD = (0.1, 0.1, 0.1, 0.1, 0.1)


@pytest.fixture
def clock():
    return Clock()


def fixed_goodputs(curve, acceptance, num_decoding, seconds=20):
    """Return the tokens per second with each fixed number of draft tokens, from 0."""

    def run(count):
        clock = Clock()
        service = SyntheticService(curve, acceptance, clock, seed=1)
        return service.run(fixed_policy(clock, count), num_decoding, seconds)

    return [run(count) for count in range(MOST + 1)]


def test_a_hand_worked_choice():
    """One draft token yields 1.7 tokens in 1.5 times the time; two yield 2.19 in twice the time."""
    table = CostTable((1,), (0, 1, 2), ((0.10, 0.15, 0.20),))
    chooser = GoodputChooser(CostModel(table))
    assert chooser.expected.of(0.0, 1, chains(2)) == pytest.approx([10, 1.7 / 0.15, 2.19 / 0.20])
    assert chooser.choose(0.0, 1, chains(2)).shape.num_draft_tokens == 1
    assert chooser.choose(0.0, 1, chains(0)).shape.num_draft_tokens == 0, (
        "no more than the shapes allow"
    )


def test_a_hand_worked_estimate_of_a_batch():
    """Three sequences are expected to yield 1.7 tokens each in 0.15 s."""
    chooser = GoodputChooser(CostModel(CostTable((3,), (0, 1), ((0.10, 0.15),))))
    estimate = chooser.expected.estimate(0.0, 3, chain(1))
    assert estimate.tokens_per_s == pytest.approx(3 * 1.7 / 0.15)
    assert estimate.speedup == pytest.approx(1.7 * 0.10 / 0.15)


def test_a_hand_worked_speedup_is_cached_for_half_a_second():
    chooser = GoodputChooser(CostModel(CostTable((1,), (0, 1), ((0.10, 0.15),))))
    assert chooser.expected.estimate(0.0, 1, chain(1)).speedup == pytest.approx(1.7 * 0.10 / 0.15)
    for _ in range(5):
        chooser.observe_step(1, chain(0), StepTiming(0.4, 0.10))
        chooser.observe_step(1, chain(1), StepTiming(0.4, 0.01))
    assert chooser.expected.estimate(0.4, 1, chain(1)).speedup == pytest.approx(1.7 * 0.10 / 0.15)
    assert chooser.expected.estimate(0.5, 1, chain(1)).speedup == pytest.approx(1.7), (
        "a step with drafts is never cheaper than one without"
    )


def test_an_estimate_depends_on_the_batch_size_and_the_shape():
    table = CostTable((1, 3), (0, 1), ((0.10, 0.15), (0.12, 0.20)))
    chooser = GoodputChooser(CostModel(table))
    assert chooser.expected.estimate(0.0, 1, chain(1)).speedup == pytest.approx(1.7 * 0.10 / 0.15)
    assert chooser.expected.estimate(0.1, 1, chain(0)).speedup == 1.0, (
        "without drafts there is nothing to gain"
    )
    assert chooser.expected.estimate(0.2, 3, chain(0)).tokens_per_s == pytest.approx(3 / 0.12)
    assert chooser.expected.estimate(0.3, 3, chain(1)).speedup == pytest.approx(1.7 * 0.12 / 0.20)


def test_a_hand_worked_gain_of_steps():
    """Three sequences with 3 accepted drafts take 2 plain steps of 0.10 s in one of 0.15 s."""
    chooser = GoodputChooser(CostModel(CostTable((3,), (0, 1), ((0.10, 0.15),))))
    chooser.choose(0.0, 3, chains(1))
    chooser.observe_drafts(1, 1, 0.0, num_drafts=3)
    chooser.observe_step(3, chain(1), StepTiming(0.15, 0.15, waited_s=0.05))
    observed = chooser.expected.costs.observed
    assert observed.spent == pytest.approx(0.15 + 0.05)
    assert observed.undrafted == pytest.approx(2 * 0.10)
    chooser.observe_step(3, chain(1), StepTiming(0.3, 0.3), is_typical=False)
    assert observed.spent == pytest.approx(0.2), "beside a prompt"
    chooser.choose(0.3, 3, chains(0))
    chooser.observe_step(3, chain(0), StepTiming(0.5, 0.12))
    assert observed.spent == pytest.approx(0.32)
    assert observed.undrafted == pytest.approx(0.32), "no gain without drafts"


@pytest.mark.parametrize(("acceptance", "num_decoding"), [(GOOD, 1), (GOOD, 8), (BAD, 8)])
def test_the_gain_of_steps_is_about_that_over_a_service_without_drafts(
    clock, acceptance, num_decoding
):
    """The profile has no batch of 8, and steps without drafts hardly run: both cause an error."""
    policy = auto_policy(clock, SMALL.table(MOST), MOST)
    service = SyntheticService(SMALL, acceptance, clock)
    service.run(policy, num_decoding, 15)  # the learning phase is not counted
    before = replace(policy.observed)
    tokens_per_s = service.run(policy, num_decoding, 60)
    measured = tokens_per_s / fixed_goodputs(SMALL, acceptance, num_decoding, seconds=60)[0]
    gain = (policy.observed.undrafted - before.undrafted) / (policy.observed.spent - before.spent)
    assert gain == pytest.approx(measured, rel=0.15 if num_decoding == 8 else 0.05)


CURVES = {"gpu": GPU, "small": SMALL}
ACCEPTANCES = {"good": GOOD, "bad": BAD}
QUICK_ERRORS = {1: 0.5, 8: 1.0, 64: 2.0}
"""By batch size, the error of a profile that `make test` has."""


def loads():
    """Yield all combinations; make test has each pair of curve, acceptance and batch size."""
    for load in product(CURVES, ACCEPTANCES, QUICK_ERRORS, QUICK_ERRORS.values()):
        curve, acceptance, num_decoding, wrong_by = load
        is_one_of_two = ((curve == "gpu") + (acceptance == "good") + (num_decoding == 8)) % 2
        is_quick = is_one_of_two and wrong_by == QUICK_ERRORS[num_decoding]
        yield pytest.param(*load, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.parametrize(("curve", "acceptance", "num_decoding", "wrong_by"), list(loads()))
def test_goodput_is_close_to_the_best_fixed_length(
    clock, curve, acceptance, num_decoding, wrong_by
):
    curve, acceptance = CURVES[curve], ACCEPTANCES[acceptance]
    policy = auto_policy(clock, curve.table(MOST, wrong_by), MOST)
    service = SyntheticService(curve, acceptance, clock)
    service.run(policy, num_decoding, 15)  # the learning phase is not counted
    best = max(fixed_goodputs(curve, acceptance, num_decoding))
    assert service.run(policy, num_decoding, 60) >= 0.95 * best


def test_while_off_only_probes_draft(clock):
    policy = auto_policy(clock, SMALL.table(MOST), MOST)
    service = SyntheticService(SMALL, BAD, clock)
    service.run(policy, 8, 120)
    assert not policy.is_on
    assert policy.log.counts[DecisionReason.PROBE] > 0
    alone = Clock()
    rate = SyntheticService(SMALL, BAD, alone).run(fixed_policy(alone, 0), 8, 120)
    assert service.num_tokens / 120 >= 0.98 * rate


def test_it_turns_on_when_acceptance_recovers(clock):
    recovered_at_s = clock.now_s + 300
    policy = auto_policy(clock, SMALL.table(MOST), MOST)
    service = SyntheticService(SMALL, lambda now_s: GOOD if now_s > recovered_at_s else BAD, clock)
    service.run(policy, 16, 299)
    assert not policy.is_on
    while not policy.is_on:
        service.step(policy, 16)
    assert clock.now_s - recovered_at_s < 95, "the longest interval between probes, and a few more"


def test_it_turns_off_when_acceptance_drops(clock):
    dropped_at_s = clock.now_s + 30
    policy = auto_policy(clock, SMALL.table(MOST), MOST)
    service = SyntheticService(SMALL, lambda now_s: BAD if now_s > dropped_at_s else GOOD, clock)
    service.run(policy, 16, 29)
    assert policy.is_on
    service.run(policy, 16, 15)
    assert not policy.is_on


def test_nothing_is_probed_while_the_threshold_has_drafts_off(clock):
    policy = auto_policy(clock, SMALL.table(MOST), MOST, threshold=4)
    service = SyntheticService(SMALL, GOOD, clock)
    service.run(policy, 20, 200)
    assert set(policy.log.counts) == {DecisionReason.THRESHOLD}


@pytest.mark.parametrize("period_s", [0.1, 0.7, 3.0])
def test_an_oscillating_load_changes_decisions_at_a_bounded_rate(clock, period_s):
    policy = auto_policy(clock, SMALL.table(MOST), MOST)
    service = SyntheticService(SMALL, GOOD, clock)
    start_s, changes, last = clock.now_s, 0, None
    while clock.now_s - start_s < 120:
        is_high = (clock.now_s // period_s) % 2
        count = service.step(policy, 64 if is_high else 1)
        changes, last = changes + (count != last), count
    assert changes / 2 <= 62, "a minute has sixty dwells"


def most_in_a_minute(times):
    counts = [index - bisect_left(times, at - 60) + 1 for index, at in enumerate(times)]
    return max(counts, default=0)


@pytest.mark.parametrize(
    ("period_s", "loads"),
    every_value([0.1, 1.1, 1.5, 3.0, None], {"1 and 64": [1, 64], "30 and 34": [30, 34]}),
)
def test_decisions_a_minute_are_bounded_while_the_load_swings_across_the_threshold(
    clock, loads, period_s
):
    """Count the changes in every minute of five; period None: the load changes at random times.

    Turning off by the threshold and on again takes two dwells, so it occurs 30 times a minute,
    each with goodput's first choice, its second, and the beginning or the end of a probe.
    """
    policy = auto_policy(clock, SMALL.table(MOST), MOST, threshold=32)
    service, generator = SyntheticService(SMALL, GOOD, clock), random.Random(3)
    started_s = turns_at_s = clock.now_s
    turn, changes = 0, set()
    while clock.now_s - started_s < 300:
        if clock.now_s >= turns_at_s:
            turn += 1
            turns_at_s += generator.choice((0.2, 1.05, 1.3, 4)) if period_s is None else period_s
        service.step(policy, loads[turn % 2])
        changes.update(policy.log.changes[-2:])
    timeline = sorted(changes, key=lambda change: change.at_s)
    numbers = [b.at_s for a, b in pairwise(timeline) if a.num_draft_tokens != b.num_draft_tokens]
    assert most_in_a_minute(numbers) <= 62, "a minute has sixty dwells"
    assert most_in_a_minute([each.at_s for each in timeline]) <= 4 * 30


def test_equal_step_times_give_equal_decisions():
    def run():
        clock = Clock()
        policy = auto_policy(clock, SMALL.table(MOST), MOST)
        service = SyntheticService(SMALL, GOOD, clock, seed=5)
        return [service.step(policy, 1 + index % 40) for index in range(2000)]

    assert run() == run()


def test_a_decision_takes_microseconds():
    """The limit is 20 times the measured time, of this thread alone. A step takes milliseconds."""
    policy = auto_policy(time.monotonic, SMALL.table(8), 8)
    policy.decide(8)
    started_at = time.thread_time()
    for _ in range(2000):
        policy.decide(8)
    assert (time.thread_time() - started_at) / 2000 < 100e-6


@pytest.mark.parametrize("name", ["margin", "dwell_s", "review_s"])
def test_a_negative_setting_is_rejected(name):
    table = CostTable((1,), (0,), ((0.1,),))
    with pytest.raises(InvalidValueError) as caught:
        GoodputChooser(CostModel(table), **{name: -0.1})
    assert caught.value.field == name


FEW_FREE_ROWS = CostTable((1, 4, 64), (0, 1), ((1.0, 1.0), (1.0, 2.0), (16.0, 32.0)))
"""Four rows are free, and each other one takes a quarter of a second."""


@pytest.mark.parametrize(
    ("prompts", "reason"),
    [
        (PromptLoad(0, 0), DecisionReason.GOODPUT),
        (PromptLoad(1, 1), DecisionReason.GOODPUT),  # its rows are free too
        (PromptLoad(8, 0), DecisionReason.GOODPUT),  # a row costs a quarter of a token alone
        (PromptLoad(8, 1), DecisionReason.PREFILL),  # and half of one of two sequences
    ],
)
def test_drafts_beside_prompts_have_to_be_worth_the_later_steps_that_they_save(prompts, reason):
    chooser = GoodputChooser(CostModel(FEW_FREE_ROWS))
    decision = chooser.choose(0.0, 1, chains(1), prompts)
    assert decision.reason is reason
    assert decision.shape == chain(1 if reason is DecisionReason.GOODPUT else 0)
    assert chooser.choose(10.0, 1, chains(1)).shape == chain(1), "the choice itself has not changed"


def test_a_head_drafts_after_prompts_if_that_pays_for_all_of_them():
    chooser = GoodputChooser(CostModel(FEW_FREE_ROWS))
    assert chooser.shape_after(PromptLoad(8, 1), 0.0, chains(1)) is None
    chooser.choose(0.0, 1, chains(1))
    assert chooser.shape_after(PromptLoad(8, 1), 0.0, chains(1)) == chain(1)
    assert chooser.shape_after(PromptLoad(8, 16), 0.0, chains(1)) == chain(0)
    assert chooser.shape_after(PromptLoad(8, 1), 0.0, chains(0)) is None, "a lower limit"


@pytest.mark.parametrize(("drafted_s", "enters_at_s"), [(1.48, 10.4), (1.0, 10.0)])
def test_a_small_gain_has_to_last_before_drafts_begin(drafted_s, enters_at_s):
    """With one sequence 1.7 tokens take 1.48 or 1 s, with eight no draft pays."""
    chooser = GoodputChooser(CostModel(CostTable((1, 8), (0, 1), ((1.0, drafted_s), (8.0, 16.0)))))
    assert chooser.choose(0.0, 8, chains(1)).shape == chain(0)
    assert chooser.choose(5.0, 8, chains(1)).shape == chain(0)
    chosen = {now_s: chooser.choose(now_s, 1, chains(1)).shape for now_s in (10.0, 10.2, 10.4)}
    assert min(now_s for now_s, shape in chosen.items() if shape == chain(1)) == enters_at_s


SMALL_GAIN = CostTable((1, 8), (0, 1), ((1.0, 1.48), (8.0, 16.0)))
"""With one sequence 1.7 tokens take 1.48 s, with eight no draft pays."""


def test_the_time_for_which_a_gain_lasts_includes_that_after_a_change():
    chooser = GoodputChooser(CostModel(SMALL_GAIN), dwell_s=1.0)
    chosen = {
        now_s: chooser.choose(now_s, num_decoding, chains(1)).shape.num_draft_tokens
        for now_s, num_decoding in ((0.0, 1), (0.1, 8), (1.0, 1), (2.0, 1), (2.1, 1))
    }
    assert chosen == {0.0: 1, 0.1: 0, 1.0: 0, 2.0: 0, 2.1: 1}


def test_a_gain_has_to_last_again_after_steps_that_an_operator_decided():
    chooser = GoodputChooser(CostModel(SMALL_GAIN))
    for now_s, num_decoding in ((0.0, 8), (5.0, 8), (10.0, 1)):
        assert chooser.choose(now_s, num_decoding, chains(1)).shape == chain(0)
    chooser.pause(10.1)
    assert chooser.choose(60.0, 1, chains(1)).shape == chain(0)
    assert chooser.choose(60.4, 1, chains(1)).shape == chain(1)


def test_drafts_are_left_at_once_and_resumed_after_two_dwells():
    chooser = GoodputChooser(CostModel(FEW_FREE_ROWS), dwell_s=1.0)
    chosen = {
        now_s: chooser.choose(now_s, num_decoding, chains(1)).shape.num_draft_tokens
        for now_s, num_decoding in ((0.0, 1), (0.1, 16), (0.2, 1), (2.0, 1), (2.2, 1), (2.3, 16))
    }
    assert chosen == {0.0: 1, 0.1: 0, 0.2: 0, 2.0: 0, 2.2: 1, 2.3: 0}


@pytest.mark.parametrize(
    ("seconds", "num_draft_tokens"),
    [(0.175, 0), (0.15, 1)],
    ids=["a gain of 7 %", "a gain of 25 %"],
)
def test_for_twice_the_sequences_drafts_need_the_margin_of_an_entry(seconds, num_draft_tokens):
    """With one sequence they pay well; the new ones first have to catch up."""
    table = CostTable((1, 2), (0, 1), ((0.10, 0.11), (0.11, seconds)))
    chooser = GoodputChooser(CostModel(table), review_s=0.0)
    assert chooser.choose(0.0, 1, chains(1)).num_draft_tokens == 1
    assert chooser.choose(0.1, 2, chains(1)).num_draft_tokens == num_draft_tokens


def test_for_known_sequences_drafts_go_on_with_a_small_gain():
    table = CostTable((2,), (0, 1), ((0.10, 0.15),))
    chooser = GoodputChooser(CostModel(table), review_s=0.0)
    assert chooser.choose(0.0, 2, chains(1)).num_draft_tokens == 1
    for _ in range(9):
        chooser.observe_step(2, chain(1), StepTiming(0.1, 0.168))
    assert chooser.choose(0.1, 2, chains(1)).num_draft_tokens == 1, "a gain of 1 %"
