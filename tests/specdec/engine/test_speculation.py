"""Speculation switched by load and by an operator, on a target without a model."""

import dataclasses
import random
from itertools import pairwise

import pytest

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.speculation.policy.cost_model import CostModel
from specdec.speculation.policy.cost_table import CostTable
from specdec.speculation.policy.goodput import GoodputChooser
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.types.control import SpeculationControl
from specdec.types.drafts.draft_decision import Decision, DecisionReason, chain
from specdec.types.errors import InvalidValueError
from specdec.types.sampling.sampling_params import SpeculationOptions
from tests.clock import Clock
from tests.specdec.engines import (
    HashTarget,
    ScriptedProposer,
    Transcript,
    engine_config,
    make_engine,
    request,
    run,
)

AUTO = SpeculationControl("auto", threshold=2, num_speculative_tokens=3)
ON = SpeculationControl("on", threshold=2, num_speculative_tokens=3)
OFF = SpeculationControl("off", threshold=2, num_speculative_tokens=3)
PROMPT = [11, 12, 13, 14, 11, 12]


@pytest.fixture
def target():
    return HashTarget(block_size=4, vocab_size=383)


@pytest.fixture
def proposer(target):
    return ScriptedProposer(target.continuation)


@pytest.fixture
def make(tiny_model_dir, target, proposer):
    def make(control):
        policy = SpeculationPolicy(control, clock=lambda: 0.0, dwell_s=0.0)
        return make_engine(tiny_model_dir, engine_config(3), target, proposer, policy)

    return make


def random_control(generator):
    return SpeculationControl(
        generator.choice(("auto", "auto", "on", "off")),
        threshold=generator.randrange(9),
        num_speculative_tokens=generator.randrange(6),
    )


def num_ended(generated):
    return sum(each.finish_reason is not None for each in generated.values())


def drafted(steps):
    """Return the largest number of draft tokens of a row in each step."""
    return [max((row.num_draft_tokens for row in step.rows), default=0) for step in steps]


def test_mode_off_calls_no_proposer_and_reserves_no_draft_slot(make, target, proposer):
    engine = make(OFF)
    engine.add(request("r", PROMPT, max_tokens=30))
    num_tokens = len(PROMPT)
    while engine.has_work:
        num_tokens += sum(len(output.token_ids) for output in engine.step())
        held = 200 - engine.stats().num_free_blocks
        assert held <= -(-num_tokens // 4), "slots beyond the next token"
    assert proposer.num_calls == 0
    assert not engine.stats().is_speculation_on


@pytest.mark.parametrize("opting_out", [{"enabled": False}, {"num_speculative_tokens": 0}], ids=str)
def test_no_proposer_is_called_for_a_request_that_opts_out(make, proposer, opting_out):
    """A draft model would compute its whole text without use."""
    engine, options = make(ON), SpeculationOptions(**opting_out)
    run(engine, [request("r", PROMPT, max_tokens=30, speculation=options)])
    assert proposer.num_calls == 0


def test_the_threshold_turns_speculation_off_at_high_load(make, target):
    engine = make(AUTO)
    prompts = {f"r{i}": [10 + (i + j) % 5 for j in range(6)] for i in range(4)}
    lengths = [10, 10, 40, 40]
    generated = run(
        engine,
        [
            request(name, prompt, max_tokens=length)
            for (name, prompt), length in zip(prompts.items(), lengths, strict=True)
        ],
    )
    for (name, prompt), length in zip(prompts.items(), lengths, strict=True):
        assert generated[name].token_ids == target.continuation(prompt, length)
    for step in target.steps:
        if sum(row.samples for row in step.rows) > 2:
            assert all(row.num_draft_tokens == 0 for row in step.rows)


def test_requests_in_prefill_do_not_count(make, target):
    engine = make(AUTO)
    engine.add(request("talking", PROMPT, max_tokens=60))
    engine.step()
    engine.step()
    begun = len(target.steps)
    for i in range(6):
        engine.add(request(f"r{i}", [11 + i % 4] * 150, max_tokens=1))
    while len(target.steps) < begun + 8:
        engine.step()
    assert all(drafted(target.steps[begun:])), "prefill turned speculation off"


def test_an_operators_mode_applies_at_the_next_step(make, target, proposer):
    engine = make(AUTO)
    engine.add(request("r", PROMPT, max_tokens=100))
    generated = []

    def go(count):
        begun, calls = len(target.steps), proposer.num_calls
        for _ in range(count):
            generated.extend(token for output in engine.step() for token in output.token_ids)
        return drafted(target.steps[begun:]), proposer.num_calls - calls

    go(2)
    engine.set_speculation(OFF)
    assert go(5) == ([0] * 5, 0)
    counts = engine.stats().counts.speculation
    assert go(5) == ([0] * 5, 0)
    assert engine.stats().counts.speculation == counts
    engine.set_speculation(ON)
    assert go(5) == ([3] * 5, 5)
    engine.set_speculation(SpeculationControl("on", threshold=2, num_speculative_tokens=7))
    assert go(2) == ([7] * 2, 2)
    while engine.has_work:
        go(1)
    assert generated == target.continuation(PROMPT, 100)
    assert engine.stats().num_speculation_flips == 2


@pytest.mark.parametrize("may_override", [True, False])
def test_an_operator_may_ignore_speculation_options_of_requests(make, target, may_override):
    engine = make(ON)
    engine.set_speculation(dataclasses.replace(ON, allow_request_override=may_override))
    asked = {
        "opts out": SpeculationOptions(enabled=False),
        "asks for one": SpeculationOptions(num_speculative_tokens=1),
        "no options": SpeculationOptions(),
    }
    requests = [request(name, PROMPT, speculation=each) for name, each in asked.items()]
    transcripts = run(engine, requests)
    longest = {
        seq_id: max(
            row.num_draft_tokens
            for step in target.steps
            for row in step.rows
            if row.seq_id == seq_id
        )
        for seq_id in range(3)
    }
    assert longest == ({0: 0, 1: 1, 2: 3} if may_override else {0: 3, 1: 3, 2: 3})
    assert {tuple(each.token_ids) for each in transcripts.values()} == {
        tuple(target.continuation(PROMPT, 24))
    }


def test_allowed_verifiers_apply_from_the_start(make):
    engine = make(dataclasses.replace(ON, allowed_verifiers=("coupled",)))
    with pytest.raises(InvalidValueError, match="what the service allows: coupled"):
        engine.add(request("r", PROMPT, speculation=SpeculationOptions(verifier="block")))


def test_an_operator_restricts_the_verifiers_of_new_requests(make):
    engine = make(ON)
    engine.set_speculation(dataclasses.replace(ON, allowed_verifiers=("coupled",)))
    named = request("r", PROMPT, speculation=SpeculationOptions(verifier="rejection"))
    with pytest.raises(InvalidValueError, match=r"speculation\.verifier is 'rejection'"):
        engine.add(named)
    engine.set_speculation(ON)
    engine.add(named)


def test_no_proposer_is_called_if_all_requests_opt_out(make, proposer):
    engine = make(ON)
    run(engine, [request("r", PROMPT, speculation=SpeculationOptions(enabled=False))])
    assert proposer.num_calls <= 1, "the prompt's step, in which nothing decodes, is not observed"
    assert set(engine.stats().counts.decisions) == {DecisionReason.REQUEST}


def test_stats_contain_decisions_and_their_changes(make):
    engine = make(ON)
    run(engine, [request("r", PROMPT, max_tokens=30)])
    num_steps = sum(engine.stats().counts.decisions.values())
    assert engine.stats().counts.decisions == {DecisionReason.OPERATOR: num_steps}
    [change] = engine.stats().decision_changes
    assert (change.num_draft_tokens, change.num_decoding) == (3, 1)
    assert engine.stats().decision == Decision(chain(3), DecisionReason.OPERATOR)


def test_goodput_bounds_adaptive_draft_lengths(tiny_model_dir, target, proposer):
    """With these costs one draft token pays and two do not, at any acceptance rate."""
    table = CostTable((1, 8), (0, 1, 2, 8), ((1.0, 1.1, 9.0, 99.0), (1.0, 1.1, 9.0, 99.0)))
    chooser = GoodputChooser(CostModel(table))
    speculation = SpeculativeConfig.of(num_speculative_tokens=3, adaptive_length=True)
    config = engine_config(speculation=speculation)
    control = SpeculationControl("auto", 8, 3)
    policy = SpeculationPolicy(
        control, lambda: 0.0, choosers={None: chooser}, length_rule=speculation.length_rule
    )
    engine = make_engine(tiny_model_dir, config, target, proposer, policy)
    generated = run(engine, [request("r", PROMPT, max_tokens=40)])
    assert generated["r"].token_ids == target.continuation(PROMPT, 40)
    assert max(drafted(target.steps)) == 1


@pytest.mark.parametrize("has_costs", [False, True])
@pytest.mark.parametrize(("number", "longest"), [(3, 8), (2, 2), (5, 5)])
def test_a_number_that_operators_set_bounds_adaptive_lengths(
    tiny_model_dir, target, proposer, has_costs, number, longest
):
    """With these costs eight draft tokens pay; 3 is the configured number."""
    table = CostTable((1, 8), (0, 8), ((1.0, 1.1), (1.0, 1.1)))
    chooser = GoodputChooser(CostModel(table))
    speculation = SpeculativeConfig.of(num_speculative_tokens=3, adaptive_length=True)
    policy = SpeculationPolicy(
        SpeculationControl("auto", 8, number),  # as after a restart, when it is set already
        lambda: 0.0,
        choosers={None: chooser} if has_costs else {},
        length_rule=speculation.length_rule,
    )
    config = engine_config(speculation=speculation)
    engine = make_engine(tiny_model_dir, config, target, proposer, policy)
    run(engine, [request("r", PROMPT, max_tokens=60)])
    assert max(drafted(target.steps)) == longest


def test_two_hundred_toggles_under_load_change_no_token(tiny_model_dir, target, proposer):
    """An operator in turn with mode, number, threshold and goodput's probes."""
    table = CostTable((1, 8), (0, 1, 3), ((1.0, 1.1, 1.3), (1.0, 1.9, 3.3)))
    clock = Clock()
    chooser = GoodputChooser(CostModel(table))
    config = engine_config(3, max_num_seqs=8)
    policy = SpeculationPolicy(AUTO, clock, dwell_s=0.0, choosers={None: chooser})
    engine = make_engine(tiny_model_dir, config, target, proposer, policy)
    generator, num_toggles = random.Random(3), 0
    generated, prompts = {}, {}
    while num_toggles < 200 or engine.has_work:
        if num_toggles < 200 and len(generated) - num_ended(generated) < 6:
            name = f"r{len(generated)}"
            generated[name], prompts[name] = (
                Transcript(),
                [10 + generator.randrange(5) for _ in range(6)],
            )
            engine.add(request(name, prompts[name], max_tokens=generator.randrange(5, 40)))
        if num_toggles < 200 and generator.random() < 0.7:
            engine.set_speculation(random_control(generator))
            num_toggles += 1
        for output in engine.step():
            generated[output.request_id].add(output)
        engine.check_integrity()
        clock.now_s += generator.random()
    assert len(generated) > 20
    for name, transcript in generated.items():
        assert transcript.error is None
        expected = target.continuation(prompts[name], len(transcript.token_ids))
        assert transcript.token_ids == expected
    reasons = set(engine.stats().counts.decisions)
    assert {DecisionReason.OPERATOR, DecisionReason.THRESHOLD, DecisionReason.GOODPUT} <= reasons
    for change, after in pairwise(engine.stats().decision_changes):
        assert change.at_s <= after.at_s


FOUR_FREE_ROWS = CostTable((1, 4), (0, 3), ((1.0, 1.1), (1.5, 16.0)))
"""A few rows are nearly free, and each one takes a second beyond four."""


def goodput_engine(directory, target, proposer, clock, chooser=None):
    chooser = chooser or GoodputChooser(CostModel(FOUR_FREE_ROWS))
    policy = SpeculationPolicy(SpeculationControl("auto", 8, 3), clock, choosers={None: chooser})
    config = engine_config(3, max_num_batched_tokens=16)
    return make_engine(directory, config, target, proposer, policy)


def test_nothing_is_drafted_beside_a_prompt_where_rows_cost_time(tiny_model_dir, target, proposer):
    clock = Clock()
    engine = goodput_engine(tiny_model_dir, target, proposer, clock)
    transcripts = {"talking": Transcript(), "late": Transcript()}

    def go(count):
        begun = len(target.steps)
        for _ in range(count):
            clock.now_s += 1.0
            for output in engine.step():
                transcripts[output.request_id].add(output)
        return drafted(target.steps[begun:])

    engine.add(request("talking", PROMPT, max_tokens=90))
    assert go(5)[1:] == [3] * 4
    engine.add(request("late", [11, 12] * 30, max_tokens=1))
    assert go(4) == [0] * 4, "fifteen tokens of the prompt in each step"
    assert engine.stats().decision.reason is DecisionReason.PREFILL
    assert all(go(3)[1:])
    assert not engine.stats().num_speculation_flips
    while engine.has_work:
        go(1)
    assert transcripts["talking"].token_ids == target.continuation(PROMPT, 90)


class ProbingChooser(GoodputChooser):
    """Lets two sequences draft in every step."""

    def __init__(self):
        super().__init__(CostModel(FOUR_FREE_ROWS))
        self.steps = []

    def choose(self, now_s, num_decoding, shapes, prompts):
        return Decision(chain(3), DecisionReason.PROBE, num_drafting=2)

    def observe_step(self, num_decoding, shape, timing, *, is_typical):
        self.steps.append((num_decoding, is_typical))


def test_a_probe_of_few_sequences_asks_for_their_drafts_alone(tiny_model_dir, target, proposer):
    """Its steps are no evidence of what drafts of all sequences cost."""
    asked, take = [], proposer.take
    proposer.take = lambda requests: asked.append(len(requests)) or take(requests)
    chooser = ProbingChooser()
    engine = goodput_engine(tiny_model_dir, target, proposer, Clock(), chooser)
    prompts = {f"r{i}": [10 + (i + j) % 5 for j in range(3)] for i in range(4)}
    added = [request(name, prompt, max_tokens=20) for name, prompt in prompts.items()]
    generated = run(engine, added)
    for name, prompt in prompts.items():
        assert generated[name].token_ids == target.continuation(prompt, 20)
    assert max(asked[1:]) == 2, "after the step of the prompts"
    drafting = [sum(row.num_draft_tokens > 0 for row in step.rows) for step in target.steps]
    assert max(drafting) == 2
    assert all(is_typical == (num_decoding <= 2) for num_decoding, is_typical in chooser.steps)
