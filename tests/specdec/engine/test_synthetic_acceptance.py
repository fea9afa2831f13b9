"""Synthetic acceptance: drafts accepted at a configured rate."""

import pytest

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.types.errors import InvalidValueError
from specdec.types.sampling.sampling_params import SpeculationOptions
from tests.specdec.engines import (
    draft_model,
    engine_config,
    local_engine,
    request,
    run,
    tokens_by,
)
from tests.specdec.tiny import tiny_llama_dir


@pytest.fixture(scope="module")
def other_model_dir(tmp_path_factory):
    return tiny_llama_dir(tmp_path_factory.mktemp("other"), layers=1, seed=3)


def test_synthetic_acceptance_keeps_wrong_drafts_at_the_configured_rate(
    tiny_model_dir, other_model_dir
):
    """The draft model has other random weights, so that coupled verification accepts little."""
    speculation = SpeculativeConfig.of(
        num_speculative_tokens=4, verifier="synthetic", synthetic_acceptance_length=3.5
    )
    config = engine_config(speculation=speculation)
    engine = local_engine(tiny_model_dir, config, proposer=draft_model(other_model_dir))
    prompts = [request(str(seed), [5, 6, 7 + seed], seed=seed, max_tokens=60) for seed in range(8)]
    generated = run(engine, prompts)
    assert {each.last.verifier for each in generated.values()} == {"synthetic"}
    by_position = engine.stats().counts.accepted_by_position
    num_drafts = engine.stats().counts.speculation.num_drafts
    assert by_position[0] == num_drafts
    assert by_position[1] > 0.9 * num_drafts  # the last drafts are cut short
    assert 0.35 < by_position[2] / num_drafts < 0.65
    assert by_position[3] == 0
    again = local_engine(tiny_model_dir, config, proposer=draft_model(other_model_dir))
    assert tokens_by(again, prompts) == {n: each.token_ids for n, each in generated.items()}


def test_a_right_draft_that_chance_rejects_is_not_counted_as_accepted(tiny_model_dir):
    """The draft model is the target: the token in place of a rejected draft equals the draft."""
    speculation = SpeculativeConfig.of(
        num_speculative_tokens=3, verifier="synthetic", synthetic_acceptance_rate=0.5
    )
    config = engine_config(speculation=speculation)
    engine = local_engine(tiny_model_dir, config, proposer=draft_model(tiny_model_dir))
    last = run(engine, [request("r", [5, 6, 7], max_tokens=60)])["r"].last
    num_steps = engine.stats().counts.num_steps
    assert last.speculation.num_drafts >= num_steps - 2
    assert last.speculation.num_accepted_tokens <= last.num_output_tokens - num_steps + 1


def test_synthetic_acceptance_needs_its_configuration(tiny_model_dir):
    engine = local_engine(tiny_model_dir, engine_config(3))
    with pytest.raises(InvalidValueError, match=r"speculation\.verifier is 'synthetic'"):
        engine.add(request("r", [5], speculation=SpeculationOptions(verifier="synthetic")))
