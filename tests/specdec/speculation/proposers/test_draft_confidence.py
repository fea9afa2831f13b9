"""Drafts that end where the draft model is no longer sure, through the real engine."""

import pytest
import torch

from specdec.config.speculative import SpeculativeConfig
from tests.specdec.engines import draft_model, engine_config, local_engine, request, run
from tests.specdec.fakes import run_ranks
from tests.specdec.tiny import tiny_llama_dir

HALF_SURE = 0.3  # about half of the tokens that the tiny model drafts are less likely


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


def said_by(engine, **params):
    return {name: each.token_ids for name, each in run(engine, requests(**params)).items()}


def recorded_lengths(engine):
    """The numbers of draft tokens of each step's rows, filled while the engine runs."""
    steps, begin = [], engine._steps.target.begin

    def recording_begin(step):
        steps.append([row.num_draft_tokens for row in step.rows if row.samples])
        begin(step)

    engine._steps.target.begin = recording_begin
    return steps


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("is_other", [False, True], ids=["itself", "other"])
def test_changing_lengths_change_nothing_that_is_said(
    tiny_model_dir, other_model_dir, temperature, is_other
):
    directory = other_model_dir if is_other else tiny_model_dir
    proposer = draft_model(directory, confidence_threshold=0.1)
    engine = local_engine(tiny_model_dir, adaptive(), proposer=proposer)
    steps = recorded_lengths(engine)
    plain = local_engine(tiny_model_dir, engine_config(0))
    assert said_by(engine, temperature=temperature) == said_by(plain, temperature=temperature)
    longest = max(max(lengths, default=0) for lengths in steps)
    assert longest == 3 if is_other else longest > 3
    proposer.check_integrity()


def test_a_draft_ends_before_a_token_that_is_unsure(tiny_model_dir):
    """The target drafts for itself: all that is left of a draft is right, and rows are ragged."""
    proposer = draft_model(tiny_model_dir, confidence_threshold=HALF_SURE)
    engine = local_engine(tiny_model_dir, engine_config(5), proposer=proposer)
    steps = recorded_lengths(engine)
    said_by(engine)
    assert engine.stats().counts.speculation.acceptance_rate >= 0.98
    lengths = {length for step in steps for length in step}
    assert lengths == {0, 1, 2, 3, 4, 5}
    assert any(len(set(step)) > 2 for step in steps)


def test_who_is_never_sure_drafts_nothing_and_falls_not_behind(tiny_model_dir):
    proposer = draft_model(tiny_model_dir, confidence_threshold=1.0)
    engine = local_engine(tiny_model_dir, engine_config(3), proposer=proposer)
    said_by(engine)
    assert engine.stats().counts.speculation.num_draft_tokens == 0
    in_prompts = sum(len(each.prompt_token_ids) for each in requests())
    assert proposer.num_catch_up_tokens <= in_prompts, "output was run again"


def test_ranks_decide_alike(tiny_model_dir):
    def said(group):
        proposer = draft_model(tiny_model_dir, group, confidence_threshold=HALF_SURE)
        engine = local_engine(tiny_model_dir, adaptive(), group, proposer)
        return said_by(engine, temperature=0.8), engine.stats().counts.speculation

    [alone] = run_ranks(1, said)
    first, second = run_ranks(2, said)
    assert first == second
    assert first[0] == alone[0]
