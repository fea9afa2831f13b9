"""Speculation turned by load and by an operator, in the engine on a target without a model."""

import pytest

from specdec.sampling_params import SpeculationOptions
from specdec.speculation import SpeculationControl, SpeculationPolicy
from tests.specdec.engines import (
    HashTarget,
    ScriptedProposer,
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


def drafted(steps):
    """The largest number of draft tokens of a row in each step."""
    return [max((row.num_draft_tokens for row in step.rows), default=0) for step in steps]


def test_off_means_no_call_and_no_slot_for_anyone(make, target, proposer):
    engine = make(OFF)
    engine.add(request("r", PROMPT, max_tokens=30))
    num_tokens = len(PROMPT)
    while engine.has_work:
        num_tokens += sum(len(output.token_ids) for output in engine.step())
        held = 200 - engine.stats().num_free_blocks
        assert held <= -(-num_tokens // 4), "slots beyond the next token"
    assert proposer.num_calls == 0
    assert not engine.stats().is_speculation_on


@pytest.mark.parametrize("declined", [{"enabled": False}, {"num_speculative_tokens": 0}], ids=str)
def test_no_proposer_hears_of_a_request_that_declines(make, proposer, declined):
    """A draft model would run the whole text of it, for nothing."""
    engine, options = make(ON), SpeculationOptions(**declined)
    run(engine, [request("r", PROMPT, max_tokens=30, speculation=options)])
    assert proposer.num_calls == 0


def test_a_threshold_turns_it_off_while_many_decode(make, target):
    engine = make(AUTO)
    prompts = {f"r{i}": [10 + (i + j) % 5 for j in range(6)] for i in range(4)}
    lengths = [10, 10, 40, 40]
    said = run(
        engine,
        [
            request(name, prompt, max_tokens=length)
            for (name, prompt), length in zip(prompts.items(), lengths, strict=True)
        ],
    )
    for (name, prompt), length in zip(prompts.items(), lengths, strict=True):
        assert said[name].token_ids == target.continuation(prompt, length)
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


def test_an_operator_turns_it_at_the_next_step(make, target, proposer):
    engine = make(AUTO)
    engine.add(request("r", PROMPT, max_tokens=100))
    said = []

    def go(count):
        begun, calls = len(target.steps), proposer.num_calls
        for _ in range(count):
            said.extend(token for output in engine.step() for token in output.token_ids)
        return drafted(target.steps[begun:]), proposer.num_calls - calls

    go(2)
    engine.set_speculation(OFF)
    assert go(5) == ([0] * 5, 0)
    counts = engine.stats().speculation
    assert go(5) == ([0] * 5, 0)
    assert engine.stats().speculation == counts
    engine.set_speculation(ON)
    assert go(5) == ([3] * 5, 5)
    engine.set_speculation(SpeculationControl("on", threshold=2, num_speculative_tokens=7))
    assert go(2) == ([7] * 2, 2)
    while engine.has_work:
        go(1)
    assert said == target.continuation(PROMPT, 100)
    assert engine.stats().num_speculation_flips == 2
