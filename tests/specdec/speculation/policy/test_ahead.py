"""Tests of the choice among drafts ahead: by hit rate and by the longer of both models' times."""

import random
from dataclasses import replace
from unittest.mock import Mock

import pytest

from specdec.speculation.policy.acceptance import AcceptanceEstimator
from specdec.speculation.policy.cost_model import CostModel
from specdec.speculation.policy.cost_table import CostTable
from specdec.speculation.policy.expected_goodput import StepTiming
from specdec.speculation.policy.goodput import GoodputChooser
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.speculation.policy.probe import Probe
from specdec.types.control import SpeculationControl
from specdec.types.drafts.draft_decision import Decision, DecisionReason, DraftAhead, chain
from tests.clock import Clock

OFF, CONTINUING, OUTCOMES = DraftAhead
COUNTS = (0, 1, 2, 4)
VERIFY_S = 0.1


def costs(draft_s):
    """Return the costs of a target whose steps take VERIFY_S, with `draft_s` for a draft token."""
    verification = CostTable((1, 8), COUNTS, ((VERIFY_S,) * 4,) * 2)
    drafting = CostTable((1, 8), COUNTS[1:], (tuple(draft_s * n for n in COUNTS[1:]),) * 2)
    whole = verification.mapped(
        lambda size, count, value: value + (drafting.step_s(size, count) if count else 0.0)
    )
    return CostModel(whole, verification, drafting)


def policy_of(clock, draft_s, choices=tuple(DraftAhead)):
    chooser = GoodputChooser(costs(draft_s))
    return SpeculationPolicy(
        SpeculationControl("auto", 100, 4), clock, choosers={None: chooser}, ahead_choices=choices
    )


def run(policy, clock, num_decoding, hit_rates, draft_s, acceptance=0.8, num_steps=1500):
    """Return how often each kind of drafts ahead was decided in the second half of the steps."""
    generator, chosen = random.Random(7), dict.fromkeys(DraftAhead, 0)
    for step in range(num_steps):
        decision = policy.decide(num_decoding)
        count, ahead = decision.num_draft_tokens, decision.ahead
        drafted, waited_s = [], None
        for _ in range(num_decoding):
            is_hit = ahead is OFF or generator.random() < hit_rates[ahead]
            if not is_hit and decision.may_wait(num_decoding):
                is_hit, waited_s = True, count * draft_s
            drafted.append(count if is_hit else 0)
        policy.begin_step(
            num_decoding, sum(map(bool, drafted)), has_prefill=False, waited_s=waited_s
        )
        clock.now_s += VERIFY_S + (count * draft_s if ahead is OFF else waited_s or 0.0)
        for own in drafted:
            accepted = 0
            while accepted < own and generator.random() < acceptance:
                accepted += 1
            policy.observe_rows(1, count, own, accepted)
        policy.end_step()
        if step > num_steps // 2 and decision.reason is not DecisionReason.PROBE:
            chosen[ahead] += 1
    return chosen


@pytest.mark.parametrize(
    ("num_decoding", "draft_s", "hit_rates", "best"),
    [
        (8, 0.02, {CONTINUING: 0.5, OUTCOMES: 0.9}, OUTCOMES),
        (8, 0.02, {CONTINUING: 0.95, OUTCOMES: 0.4}, CONTINUING),
        (8, 0.001, {CONTINUING: 0.3, OUTCOMES: 0.6}, OFF),
        (1, 0.02, {CONTINUING: 0.3, OUTCOMES: 0.8}, OUTCOMES),
        (1, 0.02, {CONTINUING: 0.6, OUTCOMES: 0.1}, CONTINUING),
    ],
)
def test_goodput_finds_the_best_drafts_ahead(num_decoding, draft_s, hit_rates, best):
    clock = Clock()
    chosen = run(policy_of(clock, draft_s), clock, num_decoding, hit_rates, draft_s)
    assert chosen[best] > 0.9 * sum(chosen.values()), chosen


def test_a_policy_without_choices_drafts_nothing_ahead():
    clock = Clock()
    chosen = run(policy_of(clock, 0.02, (OFF,)), clock, 4, {}, 0.02, num_steps=200)
    assert chosen[CONTINUING] == chosen[OUTCOMES] == 0


def test_a_method_without_a_draft_model_drafts_nothing_ahead():
    clock = Clock()
    policy = policy_of(clock, 0.02)
    policy.update(SpeculationControl("on", 100, 4, method="ngram"))
    assert policy.decide(4).ahead is OFF
    policy.update(SpeculationControl("on", 100, 4, method="draft_model"))
    assert policy.decide(4).ahead is OUTCOMES


@pytest.mark.parametrize(("draft_s", "waits"), [(0.005, True), (0.5, False)])
def test_a_sequence_alone_waits_for_a_draft_if_that_pays(draft_s, waits):
    chooser = GoodputChooser(costs(draft_s))
    decision = chooser.choose(0.0, 1, [chain(2).with_ahead(CONTINUING)])
    assert decision.waits is waits
    assert decision.may_wait(1) is waits
    assert not decision.may_wait(2), "no row waits for the draft of another"


def test_the_hit_rate_is_measured_for_each_shape():
    acceptance = AcceptanceEstimator()
    short, long = chain(1).with_ahead(OUTCOMES), chain(4).with_ahead(OUTCOMES)
    for index in range(200):
        acceptance.record_ahead(short, 1, 1, 1, 0.0, is_hit=True)
        acceptance.record_ahead(long, 4, 4 * (index % 2), 0, 0.0, is_hit=index % 2 == 1)
    assert acceptance.hit_rate(short) > 0.95
    assert acceptance.hit_rate(long) == pytest.approx(0.5, abs=0.05)


def test_misses_are_no_evidence_about_the_acceptance_of_drafts():
    acceptance = AcceptanceEstimator()
    shape = chain(2).with_ahead(CONTINUING)
    for _ in range(200):
        acceptance.record_ahead(shape, 2, 0, 0, 0.0, is_hit=False)
        acceptance.record_ahead(shape, 2, 2, 2, 0.0, is_hit=True)
    synchronous, ahead = acceptance.expected_tokens([chain(2), shape], 0.0)
    assert synchronous == pytest.approx(3.0, abs=0.1)
    assert ahead == pytest.approx(2.0, abs=0.1)


def test_drafts_that_were_too_short_for_want_of_time_yield_less_ahead_alone():
    acceptance = AcceptanceEstimator()
    shape = chain(4).with_ahead(OUTCOMES)
    for _ in range(200):
        acceptance.record_ahead(shape, 4, 2, 2, 0.0, is_hit=True)
    synchronous, ahead = acceptance.expected_tokens([chain(4), shape], 0.0)
    assert ahead == pytest.approx(3.0, abs=0.1)
    assert synchronous > 4.5


def test_a_short_trial_ahead_does_not_outweigh_what_is_known_of_all_drafts():
    """Ten drafts, of which few were accepted, and then none ahead for a minute."""
    acceptance = AcceptanceEstimator()
    shape = chain(1).with_ahead(OUTCOMES)
    for index in range(10):
        acceptance.record_ahead(shape, 1, 1, index % 5 == 0, 0.0, is_hit=True)
    for index in range(1000):
        acceptance.record(1, index % 2, 0.06 * index)
    assert acceptance.tokens_of_hit(shape) == pytest.approx(1.5, abs=0.1)


def test_the_acceptance_of_drafts_ahead_differs_where_many_show_it():
    acceptance = AcceptanceEstimator()
    shape = chain(1).with_ahead(CONTINUING)
    for index in range(1000):
        acceptance.record(1, index % 2, 0.0)
        acceptance.record_ahead(shape, 1, 1, index % 10 > 0, 0.0, is_hit=True)
    assert acceptance.tokens_of_hit(shape) == pytest.approx(1.9, abs=0.05)


def test_every_row_has_a_draft_where_rows_wait_after_a_miss():
    """All outcomes of a draft that is never right are misses, so that no row can be a hit."""
    acceptance = AcceptanceEstimator()
    acceptance.record(4, 0, 0.0, num_drafts=200)
    shape = chain(4).with_ahead(CONTINUING)
    # The first position alone is right, in a third of the rows.
    acceptance.record(1, 1, 0.0, num_drafts=100)
    assert acceptance.hit_rate(shape, waits=True) < 0.01
    assert acceptance.hit_rate(shape) > 0.2


def test_a_miss_is_not_reported_as_catching_up():
    clock = Clock()
    chooser = GoodputChooser(costs(0.02))
    control = SpeculationControl("on", 100, 4)
    choices = tuple(DraftAhead)
    policy = SpeculationPolicy(
        control, clock, choosers={None: chooser}, ahead_choices=choices, catches_up=True
    )
    policy.decide(2)
    policy.begin_step(2, 0, has_prefill=False)
    assert policy.log.counts == {DecisionReason.OPERATOR: 1}


def test_a_step_that_runs_while_settings_change_has_its_own_shape():
    chooser, control = Mock(GoodputChooser, slots=None), SpeculationControl("auto", 100, 4)
    chooser.choose.return_value = Decision(chain(2), DecisionReason.GOODPUT)
    policy = SpeculationPolicy(
        control, Clock(), choosers={None: chooser}, ahead_choices=tuple(DraftAhead)
    )
    policy.decide(1)
    policy.begin_step(1, 1, has_prefill=False)
    policy.update(replace(control, mode="on"))
    assert policy.decision.shape == chain(4).with_ahead(OUTCOMES)
    policy.observe_rows(1, 2, 2, 1)
    policy.end_step()
    chooser.observe_drafts.assert_called_once()
    chooser.observe_ahead.assert_not_called()
    assert chooser.observe_step.call_args.args[:2] == (1, chain(2))


def test_accepted_drafts_ahead_reduce_what_a_probe_has_lost():
    shape = chain(4).with_ahead(CONTINUING)
    chooser = GoodputChooser(costs(0.2))
    chooser.choose(0.0, 8, (chain(0), shape))
    [goodput] = chooser.expected.of(0.0, 8, [chain(0)])
    chooser._chosen, chooser._probe = chain(0), Probe(0.0, shape=shape, ends_at_s=9.0)
    for num_accepted in (4, 4, 2, 0, 0, 0, 0, 0):
        chooser.observe_ahead(shape, 4, 4, num_accepted, 0.0, is_hit=True)
    chooser.observe_step(8, shape, StepTiming(0.0, 0.3))
    assert chooser._probe.lost_s == pytest.approx(0.3 - 18 / goodput)
