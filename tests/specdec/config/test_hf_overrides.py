"""Overrides of config.json: their forms, what they change, and what is refused."""

import json
from dataclasses import replace

import pytest
import torch

from specdec.config.engine import ModelOptions
from specdec.config.hf_overrides import canonical_overrides, unknown_keys, with_overrides
from specdec.config.llm import LLMConfig
from specdec.engine.memory.memory_plan import memory_plan
from specdec.engine.models.model_resolution import resolve_models
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.llm.arguments import read_arguments
from specdec.models.config.model_config import ModelConfig
from specdec.models.config.rope import DefaultRope, LinearRope, read_rope, rotary_fraction
from specdec.speculation.proposers import DraftVocabulary
from specdec.types.errors import InvalidValueError
from tests.specdec.models.families import save_family
from tests.specdec.models.foreign import save_foreign
from tests.specdec.models.passes import mixed_logits
from tests.specdec.tiny import train_tokenizer

LINEAR = {"rope_type": "linear", "factor": 4.0}


def test_text_and_mappings_mean_the_same():
    as_mapping = read_arguments("model", {"hf_overrides": {"b": 1, "a": [2]}}).config
    as_text = LLMConfig(model="model", hf_overrides='{"b": 1, "a": [2]}')
    assert as_mapping.hf_overrides == as_text.hf_overrides == '{"a": [2], "b": 1}'
    assert LLMConfig.from_mapping(as_text.to_mapping()) == as_text
    assert as_text.model_options == ModelOptions(overrides='{"a": [2], "b": 1}')
    assert canonical_overrides({}) is None


@pytest.mark.parametrize(
    "value",
    [
        *("[1]", "{", 3, {1: 2}, {"a": object()}, "[" * 100_000),
        *({"quantization_config": {}}, {"text_config": {"quantization_config": {}}}),
        *({"text_config": 5}, {"text_config": None}),
    ],
)
def test_other_values_are_refused(value):
    with pytest.raises(InvalidValueError, match=r"hf_overrides is .*; it must be a JSON object"):
        LLMConfig(model="model", hf_overrides=value)


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("stored", ["rope_parameters", "rope_scaling"])
def test_an_override_of_the_rotary_embedding_replaces_both_spellings(spelling, stored):
    raw = {"rope_theta": 500.0, "rope_scaling": {"rope_type": "yarn"}}
    if stored == "rope_parameters":
        raw = {stored: {"rope_theta": 500.0, "rope_type": "yarn"}}
    changed = with_overrides(raw, json.dumps({spelling: LINEAR}))
    assert changed == {"rope_theta": 500.0, spelling: LINEAR}


@pytest.mark.parametrize("stored", ["rope_parameters", "rope_scaling"])
def test_a_base_at_the_top_level_replaces_the_one_inside(stored):
    """transformers 5 writes the base into rope_parameters, which have precedence in a file."""
    scaled = {"max_position_embeddings": 64, stored: {**LINEAR, "rope_theta": 500.0}}
    assert read_rope(with_overrides(scaled, '{"rope_theta": 9.0}')) == LinearRope(9.0, 4.0)
    plain = {"max_position_embeddings": 64, stored: {"rope_theta": 500.0}}
    assert read_rope(with_overrides(plain, '{"rope_theta": 9.0}')) == DefaultRope(9.0)


def test_a_rotated_part_of_heads_survives_an_override_of_the_scaling():
    raw = {"rope_parameters": {"partial_rotary_factor": 0.5}, "max_position_embeddings": 64}
    assert rotary_fraction(with_overrides(raw, json.dumps({"rope_scaling": LINEAR}))) == 0.5
    replaced = json.dumps({"rope_scaling": {**LINEAR, "partial_rotary_factor": 0.25}})
    assert rotary_fraction(with_overrides(raw, replaced)) == 0.25


GEMMA = {
    "full_attention": {"rope_theta": 500.0, **LINEAR},
    "sliding_attention": {"rope_theta": 30.0, "rope_type": "default"},
}
YARN = {"rope_type": "yarn", "factor": 2.0}


@pytest.mark.parametrize(
    ("overrides", "full", "sliding"),
    [
        ({"rope_theta": 9.0}, {"rope_theta": 9.0}, {}),
        ({"rope_local_base_freq": 9.0}, {}, {"rope_theta": 9.0}),
        ({"rope_scaling": YARN}, YARN, {}),
        ({"rope_parameters": {"full_attention": YARN}}, YARN, {}),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 7.0}}}, {}, {"rope_theta": 7.0}),
    ],
    ids=str,
)
def test_types_of_layers_without_an_override_keep_theirs(overrides, full, sliding):
    raw = {"rope_parameters": GEMMA, "vocab_size": 5}
    changed = with_overrides(raw, json.dumps(overrides))
    assert changed["rope_parameters"]["full_attention"] == {**GEMMA["full_attention"], **full}
    found = changed["rope_parameters"]["sliding_attention"]
    assert found["rope_theta"] == {**GEMMA["sliding_attention"], **sliding}["rope_theta"]
    assert "rope_scaling" not in changed
    assert unknown_keys(raw, json.dumps(overrides)) == []


def test_a_base_at_the_top_level_is_that_of_each_type_with_the_same_one():
    """OLMo 3 has one base for both types of layers."""
    same = {kind: {**each, "rope_theta": 500.0} for kind, each in GEMMA.items()}
    changed = with_overrides({"rope_parameters": same}, '{"rope_theta": 9.0}')["rope_parameters"]
    assert [each["rope_theta"] for each in changed.values()] == [9.0, 9.0]


def test_an_override_by_type_keeps_the_scaling_of_an_older_file():
    raw = {"rope_theta": 500.0, "rope_local_base_freq": 30.0, "rope_scaling": LINEAR}
    overrides = {"rope_parameters": {"sliding_attention": {"rope_theta": 7.0}}}
    changed = with_overrides(raw, json.dumps(overrides))
    assert changed.pop("rope_parameters") == {
        "full_attention": LINEAR,
        "sliding_attention": {"rope_theta": 7.0},
    }
    assert changed == {"rope_theta": 500.0, "rope_local_base_freq": 30.0}


@pytest.mark.parametrize("name", ["gemma3", "olmo3"])
def test_models_with_ropes_by_type_have_the_overridden_ones(tmp_path, name):
    save_family(tmp_path, name)
    before = ModelConfig.from_directory(tmp_path)
    options = ModelOptions(overrides='{"rope_theta": 123.0}')
    after = ModelConfig.from_directory(tmp_path, options)
    assert after.rope == replace(before.rope, theta=123.0)
    pairs = zip(before.ropes, after.ropes, strict=True)
    has_one_base = name == "olmo3"
    assert [found != was for was, found in pairs] == [has_one_base, True, has_one_base]


def test_a_draft_model_is_compared_with_the_overridden_target(tmp_path):
    for name in ("draft", "target"):
        save_family(tmp_path / name, "llama-tied")
        train_tokenizer(383).save_pretrained(tmp_path / name)
    directories = tmp_path / "draft", tmp_path / "target"
    assert DraftVocabulary.between(*directories).shared is None
    options = ModelOptions(overrides='{"vocab_size": 400}')
    shared = DraftVocabulary.between(*directories, options).shared
    assert len(shared.target_to_draft) == 400
    assert len(shared.draft_to_target) == 383


def test_keys_of_the_text_model_are_merged():
    raw = {"text_config": {"a": 1, "b": 2}, "other": {"a": 1}}
    overrides = json.dumps({"text_config": {"b": 3}, "other": {"b": 3}})
    assert with_overrides(raw, overrides) == {"text_config": {"a": 1, "b": 3}, "other": {"b": 3}}
    assert unknown_keys(raw, json.dumps({"othre": 1, "other": 2})) == ["othre"]


def test_logits_are_those_of_a_config_with_these_keys(tmp_path):
    options = ModelOptions(overrides=json.dumps({"rope_scaling": LINEAR, "sliding_window": 5}))
    save_family(tmp_path, "mistral")
    ids = [list(range(5, 45)), list(range(60, 100))]
    group = TensorParallelGroup()
    plain = mixed_logits(tmp_path, ids, group)
    found = mixed_logits(tmp_path, ids, group, options=options)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    theta = raw.pop("rope_parameters")["rope_theta"]
    raw |= {"rope_theta": theta, "rope_scaling": LINEAR, "sliding_window": 5}
    path.write_text(json.dumps(raw))
    assert torch.equal(found, mixed_logits(tmp_path, ids, group))
    assert (found - plain).abs().max() > 0.1
    assert ModelConfig.from_directory(tmp_path, options).rope == LinearRope(theta, 4.0)


def test_an_added_key_is_reported_and_transformers_models_take_none(tmp_path):
    save_foreign(tmp_path, "gpt2")
    train_tokenizer(383).save_pretrained(tmp_path)
    config = LLMConfig(
        model=str(tmp_path), hf_overrides={"slidding_window": 4}, speculative_config=None
    )
    lines = []
    models = resolve_models(config, lines.append).configs()
    assert any("config.json has no slidding_window" in line for line in lines)
    with pytest.raises(InvalidValueError, match=r"hf_overrides .* must be none"):
        memory_plan(config, models, 2**33)
