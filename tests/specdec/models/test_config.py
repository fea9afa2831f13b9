"""ModelConfig against the configuration classes of transformers."""

import json

import pytest
import transformers

from specdec.models.config import ModelConfig
from specdec.models.registry import SUPPORTED_ARCHITECTURES
from specdec.types.errors import ModelNotFoundError, UnsupportedModelError

SIZES = {
    "vocab_size": 100,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
}


def read(architecture, **changes):
    return ModelConfig.from_dict({**SIZES, "architectures": [architecture], **changes}, {})


def reference(architecture, **changes):
    name = architecture.removesuffix("ForCausalLM")
    return getattr(transformers, f"{name}Config")(**SIZES, **changes)


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_missing_keys_have_the_defaults_of_transformers(architecture):
    config, expected = read(architecture), reference(architecture)
    head_dim = getattr(expected, "head_dim", None) or 256 // 32
    assert config.num_kv_heads == expected.num_key_value_heads
    assert config.head_dim == head_dim
    assert config.tie_word_embeddings == expected.tie_word_embeddings
    assert config.rope.theta == expected.rope_parameters["rope_theta"]
    window = 4096 if architecture == "MistralForCausalLM" else None
    assert config.sliding_windows == (window,) * 30
    assert window == getattr(expected, "sliding_window", None)


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_null_num_key_value_heads_means_num_attention_heads(architecture):
    assert read(architecture, num_key_value_heads=None).num_kv_heads == 32


@pytest.mark.parametrize(
    ("architecture", "qkv", "output", "mlp", "qk_norm"),
    [
        ("LlamaForCausalLM", True, True, True, False),
        ("MistralForCausalLM", False, False, False, False),
        ("Qwen2ForCausalLM", True, False, False, False),
        ("Qwen3ForCausalLM", True, True, False, True),
    ],
)
def test_biases_match_the_architecture(architecture, qkv, output, mlp, qk_norm):
    config = read(architecture, attention_bias=True, mlp_bias=True)
    assert (config.has_qkv_bias, config.has_output_bias) == (qkv, output)
    assert (config.has_mlp_bias, config.has_qk_norm) == (mlp, qk_norm)
    silent = read(architecture)
    assert silent.has_qkv_bias == (architecture == "Qwen2ForCausalLM")
    assert not silent.has_output_bias
    assert not silent.has_mlp_bias


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 8},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
        {"use_sliding_window": True, "sliding_window": None},
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 15,
        },
    ],
    ids=["unused", "defaults", "last-layers", "null", "by-layer"],
)
def test_sliding_windows_match_transformers(architecture, changes):
    expected = reference(architecture, **changes)
    assert read(architecture, **changes).sliding_windows == tuple(
        expected.sliding_window if each == "sliding_attention" else None
        for each in expected.layer_types
    )


def test_keys_of_another_architecture_are_ignored():
    assert read("LlamaForCausalLM", sliding_window=8).sliding_windows == (None,) * 30


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        (
            "GemmaForCausalLM",
            {},
            "GemmaForCausalLM is not supported; supported: LlamaForCausalLM, MistralForCausalLM, "
            "Qwen2ForCausalLM, Qwen3ForCausalLM",
        ),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "hidden_act .* 'gelu'; it must be silu"),
        ("LlamaForCausalLM", {"hidden_size": "9"}, "hidden_size .* '9'; it must be a whole"),
        ("LlamaForCausalLM", {"vocab_size": 0}, "vocab_size .* is 0; it must be a whole"),
        ("LlamaForCausalLM", {"num_key_value_heads": 5}, r"is 5; it must be a divisor .* \(32\)"),
        ("LlamaForCausalLM", {"head_dim": 7}, "head_dim .* is 7; it must be even"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "su"}}, "rope type su is not supported"),
        ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window .* 0; it must be a whole"),
        ("MistralForCausalLM", {"layer_types": []}, "must be left out of a Mistral model"),
        (
            "Qwen3ForCausalLM",
            {"layer_types": ["sliding_attention"] * 30},
            "it must be 30 times full_attention",
        ),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "layer_types": ["full_attention"]},
            "it must be 30 times full_attention or sliding_attention",
        ),
    ],
)
def test_unsupported_values_are_rejected_with_the_supported_ones(architecture, changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        read(architecture, **changes)


def test_missing_keys_are_named(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(UnsupportedModelError, match=r"config\.json has no vocab_size, hidden_size"):
        ModelConfig.from_directory(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_config_that_is_not_an_object_is_rejected(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UnsupportedModelError, match=r"is not (valid JSON|a JSON object)"):
        ModelConfig.from_directory(tmp_path)


def test_kv_bytes_count_a_head_once_for_each_rank_that_has_it():
    config = read("Qwen3ForCausalLM", num_key_value_heads=2, head_dim=128)
    assert config.kv_bytes_per_token("float16") == 2 * 30 * 2 * 128 * 2
    assert config.kv_bytes_per_token("float32", 3) == 2 * 30 * 3 * 128 * 4


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": 7}, "architectures"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architecture"),
        ({"eos_token_id": [1, [2]]}, "eos_token_id"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rope_scaling": True}, "rope_scaling"),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers"),
        ({"num_hidden_layers": 10_001}, "num_hidden_layers"),
        ({"max_position_embeddings": "many"}, "config.json"),
        ({"hidden_act": "x" * 10_000}, "hidden_act"),
    ],
)
def test_values_of_the_wrong_type_are_one_clear_error(tiny_model_dir, tmp_path, changes, named):
    content = json.loads((tiny_model_dir / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UnsupportedModelError) as caught:
        ModelConfig.from_directory(tmp_path)
    assert named in str(caught.value)
    assert len(str(caught.value)) < 1000
