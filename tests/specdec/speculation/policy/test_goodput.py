"""The goodput policy on a synthetic target, by a clock that the target winds."""

import random
import time
from bisect import bisect_left
from itertools import pairwise

import pytest

from benchmarks.synthetic_service import CostCurve, SyntheticService, auto_policy, fixed_policy
from specdec.speculation.policy.cost_model import CostModel, CostTable
from specdec.speculation.policy.goodput import GoodputChooser
from specdec.types.draft_decision import DecisionReason, chain, chains
from specdec.types.errors import InvalidValueError
from tests.clock import Clock

MOST = 5
GPU = CostCurve(weights_s=0.010, row_s=0.0001, draft_s=0.0008)
SMALL = CostCurve(weights_s=0.020, row_s=0.001, draft_s=0.002)
GOOD = (0.85, 0.8, 0.75, 0.7, 0.7)
BAD = (0.1, 0.1, 0.1, 0.1, 0.1)


@pytest.fixture
def clock():
    return Clock()


def fixed_goodputs(curve, acceptance, num_decoding, seconds=20):
    """Tokens a second with each fixed number of draft tokens, 0 first."""

    def run(count):
        clock = Clock()
        service = SyntheticService(curve, acceptance, clock, seed=1)
        return service.run(fixed_policy(clock, count), num_decoding, seconds)

    return [run(count) for count in range(MOST + 1)]


def test_a_hand_worked_choice():
    """One draft token: yields 1.7 for 1.5 times the time. Two: 2.19 for twice."""
    table = CostTable((1,), (0, 1, 2), ((0.10, 0.15, 0.20),))
    chooser = GoodputChooser(CostModel(table))
    assert chooser.goodputs(0.0, 1, chains(2)) == pytest.approx([10, 1.7 / 0.15, 2.19 / 0.20])
    assert chooser.choose(0.0, 1, chains(2)).shape.num_draft_tokens == 1
    assert chooser.choose(0.0, 1, chains(0)).shape.num_draft_tokens == 0, (
        "no more than there is room for"
    )


def test_a_hand_worked_estimate_of_a_batch():
    """Three sequences, of which each is to yield 1.7 tokens in 0.15 s."""
    chooser = GoodputChooser(CostModel(CostTable((3,), (0, 1), ((0.10, 0.15),))))
    estimate = chooser.estimate(0.0, 3, chain(1))
    assert estimate.tokens_per_s == pytest.approx(3 * 1.7 / 0.15)
    assert estimate.speedup == pytest.approx(1.7 * 0.10 / 0.15)


def test_a_hand_worked_speedup_which_holds_for_half_a_second():
    chooser = GoodputChooser(CostModel(CostTable((1,), (0, 1), ((0.10, 0.15),))))
    assert chooser.estimate(0.0, 1, chain(1)).speedup == pytest.approx(1.7 * 0.10 / 0.15)
    for _ in range(5):
        chooser.observe_step(1, chain(0), seconds=0.10, now_s=0.4)
        chooser.observe_step(1, chain(1), seconds=0.01, now_s=0.4)
    assert chooser.estimate(0.4, 1, chain(1)).speedup == pytest.approx(1.7 * 0.10 / 0.15)
    assert chooser.estimate(0.5, 1, chain(1)).speedup == pytest.approx(1.7), (
        "cheaper than no drafts: noise"
    )


def test_an_estimate_is_of_the_steps_that_are_asked_about():
    table = CostTable((1, 3), (0, 1), ((0.10, 0.15), (0.12, 0.20)))
    chooser = GoodputChooser(CostModel(table))
    assert chooser.estimate(0.0, 1, chain(1)).speedup == pytest.approx(1.7 * 0.10 / 0.15)
    assert chooser.estimate(0.1, 1, chain(0)).speedup == 1.0, (
        "without drafts there is nothing to gain"
    )
    assert chooser.estimate(0.2, 3, chain(0)).tokens_per_s == pytest.approx(3 / 0.12)
    assert chooser.estimate(0.3, 3, chain(1)).speedup == pytest.approx(1.7 * 0.12 / 0.20)


@pytest.mark.parametrize("curve", [GPU, SMALL], ids=["gpu", "small"])
@pytest.mark.parametrize("acceptance", [GOOD, BAD], ids=["good", "bad"])
@pytest.mark.parametrize("num_decoding", [1, 8, 64])
@pytest.mark.parametrize("wrong_by", [0.5, 1.0, 2.0])
def test_it_regrets_little(clock, curve, acceptance, num_decoding, wrong_by):
    policy = auto_policy(clock, curve.table(MOST, wrong_by), MOST)
    service = SyntheticService(curve, acceptance, clock)
    service.run(policy, num_decoding, 15)  # what it learns in is not counted
    best = max(fixed_goodputs(curve, acceptance, num_decoding))
    assert service.run(policy, num_decoding, 60) >= 0.95 * best


def test_off_is_plain_decoding_but_for_probes(clock):
    policy = auto_policy(clock, SMALL.table(MOST), MOST)
    service = SyntheticService(SMALL, BAD, clock)
    service.run(policy, 8, 120)
    counts = policy.log.counts
    assert counts[DecisionReason.PROBE] < 0.03 * service.num_steps
    assert not policy.is_on


def test_it_notices_that_acceptance_came_back(clock):
    came_back_at_s = clock.now_s + 300
    policy = auto_policy(clock, SMALL.table(MOST), MOST)
    service = SyntheticService(SMALL, lambda now_s: GOOD if now_s > came_back_at_s else BAD, clock)
    service.run(policy, 16, 299)
    assert not policy.is_on
    while not policy.is_on:
        service.step(policy, 16)
    assert clock.now_s - came_back_at_s < 65, "the longest wait for a probe, and the probe"


def test_it_notices_that_acceptance_went(clock):
    gone_at_s = clock.now_s + 30
    policy = auto_policy(clock, SMALL.table(MOST), MOST)
    service = SyntheticService(SMALL, lambda now_s: BAD if now_s > gone_at_s else GOOD, clock)
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


@pytest.mark.parametrize("loads", [(1, 64), (30, 34)])
@pytest.mark.parametrize("period_s", [0.1, 1.1, 1.5, 3.0, None])
def test_decisions_a_minute_are_bounded_while_the_load_swings_across_the_threshold(
    clock, loads, period_s
):
    """In every minute of five. None: it swings at random times.

    Off by the threshold and back takes two dwells, so there are thirty times of that in a minute,
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


def test_the_same_times_decide_the_same():
    def run():
        clock = Clock()
        policy = auto_policy(clock, SMALL.table(MOST), MOST)
        service = SyntheticService(SMALL, GOOD, clock, seed=5)
        return [service.step(policy, 1 + index % 40) for index in range(2000)]

    assert run() == run()


def test_a_decision_takes_microseconds():
    """On the real clock; a step takes milliseconds. Twenty times what was measured."""
    policy = auto_policy(time.monotonic, SMALL.table(8), 8)
    policy.decide(8)
    started_at = time.perf_counter()
    for _ in range(2000):
        policy.decide(8)
    assert (time.perf_counter() - started_at) / 2000 < 100e-6


@pytest.mark.parametrize("name", ["margin", "dwell_s", "review_s"])
def test_a_negative_setting_is_named(name):
    table = CostTable((1,), (0,), ((0.1,),))
    with pytest.raises(InvalidValueError) as caught:
        GoodputChooser(CostModel(table), **{name: -0.1})
    assert caught.value.field == name
