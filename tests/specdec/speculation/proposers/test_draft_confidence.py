"""Tests of the confidence threshold of draft models, through the real engine."""

from dataclasses import replace

import pytest
import torch

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.types.control import SpeculationControl
from specdec.types.sampling.sampling_params import SpeculationOptions
from tests.specdec.engines import draft_model, engine_config, local_engine, request, run, tokens_by
from tests.specdec.fakes import run_ranks
from tests.specdec.tiny import tiny_llama_dir

HALF_CONFIDENT = 0.3  # about half of the tiny model's draft tokens have a lower probability


@pytest.fixture(scope="module")
def other_model_dir(tmp_path_factory):
    return tiny_llama_dir(tmp_path_factory.mktemp("other"), layers=1, seed=3)


def requests(count=6, **params):
    generator = torch.Generator().manual_seed(9)
    prompts = torch.randint(3, 383, (count, 20), generator=generator).tolist()
    return [
        request(f"r{i}", prompt[: 3 + 3 * i], seed=40 + i, max_tokens=40, **params)
        for i, prompt in enumerate(prompts)
    ]


def adaptive(k=3):
    speculation = SpeculativeConfig.of(num_speculative_tokens=k, adaptive_length=True)
    return engine_config(speculation=speculation)


def generated_by(engine, **params):
    return tokens_by(engine, requests(**params))


def recorded_lengths(engine):
    """Return a list to which each step appends its rows' numbers of draft tokens."""
    steps, begin = [], engine._steps.target.begin

    def recording_begin(step):
        steps.append([row.num_draft_tokens for row in step.rows if row.samples])
        begin(step)

    engine._steps.target.begin = recording_begin
    return steps


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("is_other", [False, True], ids=["itself", "other"])
def test_adaptive_lengths_do_not_change_the_output(
    tiny_model_dir, other_model_dir, temperature, is_other
):
    directory = other_model_dir if is_other else tiny_model_dir
    proposer = draft_model(directory, confidence_threshold=0.1)
    engine = local_engine(tiny_model_dir, adaptive(), proposer=proposer)
    steps = recorded_lengths(engine)
    plain = local_engine(tiny_model_dir, engine_config(0))
    assert generated_by(engine, temperature=temperature) == generated_by(
        plain, temperature=temperature
    )
    longest = max(max(lengths, default=0) for lengths in steps)
    assert longest == 3 if is_other else longest > 3
    proposer.check_integrity()


def test_a_draft_ends_before_a_token_below_the_threshold(tiny_model_dir):
    """The target drafts for itself, so the drafted tokens are right; row lengths differ."""
    proposer = draft_model(tiny_model_dir, confidence_threshold=HALF_CONFIDENT)
    engine = local_engine(tiny_model_dir, engine_config(5), proposer=proposer)
    steps = recorded_lengths(engine)
    generated_by(engine)
    assert engine.stats().counts.speculation.acceptance_rate >= 0.98
    lengths = {length for step in steps for length in step}
    assert lengths == {0, 1, 2, 3, 4, 5}
    assert any(len(set(step)) > 2 for step in steps)


def test_a_threshold_of_one_drafts_nothing_and_needs_no_catch_up(tiny_model_dir):
    proposer = draft_model(tiny_model_dir, confidence_threshold=1.0)
    engine = local_engine(tiny_model_dir, engine_config(3), proposer=proposer)
    generated_by(engine)
    assert engine.stats().counts.speculation.num_draft_tokens == 0
    in_prompts = sum(len(each.prompt_token_ids) for each in requests())
    assert proposer.num_catch_up_tokens <= in_prompts, "output was run again"


def test_all_ranks_decide_the_same(tiny_model_dir):
    def generate_on(group):
        proposer = draft_model(tiny_model_dir, group, confidence_threshold=HALF_CONFIDENT)
        engine = local_engine(tiny_model_dir, adaptive(), group, proposer)
        return generated_by(engine, temperature=0.8), engine.stats().counts.speculation

    [alone] = run_ranks(1, generate_on)
    first, second = run_ranks(2, generate_on)
    assert first == second
    assert first[0] == alone[0]


def lengths_by_request(engine, thresholds):
    """Return the draft lengths of requests that differ in their threshold alone."""
    found = {}
    for threshold in thresholds:
        speculation = SpeculationOptions(draft_confidence_threshold=threshold)
        before = engine.stats().counts.speculation
        generated_by(engine, speculation=speculation)
        after = engine.stats().counts.speculation
        num_drafts = max(1, after.num_drafts - before.num_drafts)
        found[threshold] = (after.num_draft_tokens - before.num_draft_tokens) / num_drafts
    return found


def test_a_request_may_have_its_own_threshold(tiny_model_dir):
    proposer = draft_model(tiny_model_dir, confidence_threshold=HALF_CONFIDENT)
    engine = local_engine(tiny_model_dir, engine_config(5), proposer=proposer)
    lengths = lengths_by_request(engine, (None, 0.0, HALF_CONFIDENT, 1.0))
    assert lengths[None] == lengths[HALF_CONFIDENT]
    assert lengths[1.0] == 0 < lengths[None] < lengths[0.0]


def test_thresholds_of_requests_hold_side_by_side(tiny_model_dir):
    proposer = draft_model(tiny_model_dir)
    engine = local_engine(tiny_model_dir, engine_config(5), proposer=proposer)
    asked = [
        replace(each, params=replace(each.params, speculation=SpeculationOptions(**options)))
        for each, options in zip(
            requests(4), [{}, {"draft_confidence_threshold": 1.0}] * 2, strict=True
        )
    ]
    drafted = [each.last.speculation.num_draft_tokens for each in run(engine, asked).values()]
    assert drafted[1] == drafted[3] == 0 < min(drafted[0], drafted[2])


def test_an_override_that_is_not_allowed_has_no_effect(tiny_model_dir):
    proposer = draft_model(tiny_model_dir, confidence_threshold=HALF_CONFIDENT)
    control = SpeculationControl("on", 32, 5, allow_request_override=False)
    policy = SpeculationPolicy(control, clock=lambda: 0.0)
    engine = local_engine(tiny_model_dir, engine_config(5), proposer=proposer, policy=policy)
    lengths = lengths_by_request(engine, (None, 0.0))
    assert lengths[None] == lengths[0.0]
