"""Sampling defaults from a model's generation_config.json."""

import json
import shutil

import pytest

from specdec.config.llm import LLMConfig
from specdec.models.config.config_files import read_sampling_defaults
from specdec.models.config.model_config import ModelConfig
from specdec.types.errors import InvalidValueError, UnsupportedModelError
from specdec.types.sampling.sampling_params import SamplingDefaults
from tests.specdec.engines import HashTarget, engine_config, make_engine, request, run

PROMPT = [11, 12, 13]


def test_every_field_is_read():
    found = read_sampling_defaults(
        {
            "temperature": 0.6,
            "top_p": 0.95,
            "top_k": 20,
            "min_p": 0.05,
            "repetition_penalty": 1.05,
            "max_new_tokens": 2048,
            "do_sample": False,
            "eos_token_id": 2,
        }
    )
    assert found == SamplingDefaults(0.6, 0.95, 20, 0.05, 1.05, 2048)


@pytest.mark.parametrize("generation", [{}, {"temperature": None, "top_k": None}])
def test_missing_or_null_fields_have_no_effect(generation):
    assert read_sampling_defaults(generation) == SamplingDefaults()


def test_top_k_of_minus_one_disables_top_k():
    assert read_sampling_defaults({"top_k": -1}).top_k == 0


def test_whole_numbers_as_floats_are_read():
    found = read_sampling_defaults({"top_k": 20.0, "max_new_tokens": 3.0, "temperature": 1.0})
    assert found == SamplingDefaults(top_k=20, max_tokens=3)
    assert (type(found.top_k), type(found.max_tokens), type(found.temperature)) == (int, int, float)


@pytest.mark.parametrize(
    ("generation", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 3.5}, "max_new_tokens"),
    ],
)
def test_a_value_that_is_invalid_for_requests_is_rejected(generation, field):
    with pytest.raises(UnsupportedModelError, match=rf"{field} in generation_config\.json is "):
        read_sampling_defaults(generation)


def test_a_value_of_another_type_is_rejected():
    with pytest.raises(UnsupportedModelError, match=r"generation_config\.json"):
        read_sampling_defaults({"temperature": "warm"})


@pytest.fixture
def model_dir(tiny_model_dir, tmp_path):
    directory = shutil.copytree(tiny_model_dir, tmp_path / "model")
    path = directory / "generation_config.json"
    wishes = {"temperature": 0.5, "top_p": 0.75, "max_new_tokens": 5}
    path.write_text(json.dumps({**json.loads(path.read_text()), **wishes}))
    return directory


def test_a_request_without_parameters_uses_the_models_defaults(model_dir):
    target = HashTarget(block_size=4, vocab_size=383)
    engine = make_engine(model_dir, engine_config(), target)
    silent = request("silent", PROMPT, temperature=None, max_tokens=None)
    transcripts = run(engine, [silent, request("asking", PROMPT, max_tokens=7)])
    assert [len(transcripts[name].token_ids) for name in ("silent", "asking")] == [5, 7]
    rules = [each.rules for step in target.steps for each in step.admitted]
    assert [(each.temperature, each.top_p) for each in rules] == [(0.5, 0.75), (0.0, 0.75)]


def test_a_request_for_more_tokens_than_the_models_default_is_rejected(model_dir):
    engine = make_engine(model_dir, engine_config(), HashTarget(block_size=4, vocab_size=383))
    for max_tokens, min_tokens in ((None, 5), (6, 6)):
        engine.check(request("r", PROMPT, max_tokens=max_tokens, min_tokens=min_tokens))
    with pytest.raises(InvalidValueError, match="min_tokens is 6; it must be at most 5, the defa"):
        engine.check(request("r", PROMPT, max_tokens=None, min_tokens=6))
    room = len(PROMPT) + 3
    short = HashTarget(block_size=4, vocab_size=383)
    engine = make_engine(model_dir, engine_config(max_model_len=room), short)
    with pytest.raises(
        InvalidValueError, match="min_tokens is 4; it must be at most 3, what the c"
    ):
        engine.check(request("r", PROMPT, max_tokens=None, min_tokens=4))


@pytest.mark.parametrize("content", ['{"eos_token_id": 7, "top_p": 0.0}', '{"eos_token_id": 7,}'])
def test_without_defaults_only_end_tokens_are_read(model_dir, caplog, content):
    ends = ModelConfig.from_directory(model_dir).eos_token_ids
    (model_dir / "generation_config.json").write_text(content)
    with pytest.raises(UnsupportedModelError, match=r"generation_config\.json"):
        ModelConfig.from_directory(model_dir)
    found = ModelConfig.from_directory(
        model_dir, LLMConfig("m", generation_config="none").model_options
    )
    assert found.sampling_defaults == SamplingDefaults()
    is_readable = content.endswith("0.0}")
    assert found.eos_token_ids == (ends | {7} if is_readable else ends)
    assert ("generation_config.json is not valid JSON" in caplog.text) != is_readable
