# Modules: specdec.config.json_values, specdec.models.config.families.family_traits
# Modules: specdec.models.config.layer_patterns, specdec.models.config.traits
# Modules: specdec.models.config.unsupported
"""ModelConfig against the configuration classes of transformers."""

import json

import pytest

from specdec.models.config.model_config import ModelConfig
from specdec.models.config.registry import ARCHITECTURES, SUPPORTED_ARCHITECTURES
from specdec.models.config.traits import Activation, LogitTransform
from specdec.types.errors import ModelNotFoundError, UnsupportedModelError
from tests.specdec.models.families import config_class

SIZES = {
    "vocab_size": 100,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "max_position_embeddings": 128,
}


WITHOUT_DEFAULTS = {
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
    "Dots1ForCausalLM": {"num_experts_per_tok": 6, "n_routed_experts": 8, "n_shared_experts": 1},
    "GraniteMoeHybridForCausalLM": {
        "num_local_experts": 0,
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "layer_types": [*["linear_attention"] * 29, "full_attention"],
    },
    "NemotronHForCausalLM": {"hybrid_override_pattern": "M*-" * 10},
    "BambaForCausalLM": {"attn_layer_indices": [3], "mamba_n_heads": 8},
}
"""Keys of families for which transformers has no defaults that are supported."""


def sizes(architecture):
    family = ARCHITECTURES.get(architecture)
    norm = {"rms_norm_eps" if family is None else family.norm_eps_key: 1e-6}
    return {**SIZES, **norm, **WITHOUT_DEFAULTS.get(architecture, {})}


def read(architecture, **changes):
    raw = {**sizes(architecture), "architectures": [architecture], **changes}
    return ModelConfig.from_dict(raw, {})


def reference(architecture, **changes):
    family = architecture.removesuffix("ForCausalLM")
    return config_class(family)(**sizes(architecture), **changes)


def layer_types(expected):
    found = getattr(expected, "layer_types", None)
    return found or ["full_attention"] * expected.num_hidden_layers


def windows(expected):
    window = getattr(expected, "sliding_window", None)
    if getattr(expected, "layer_types", None) is None:
        return (window,) * 30
    return tuple(window if kind == "sliding_attention" else None for kind in expected.layer_types)


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_missing_keys_have_the_defaults_of_transformers(architecture):
    config, expected = read(architecture), reference(architecture)
    if config.varied is not None:
        layers = (expected.per_layer_config[index] for index in range(30))
        sizes = [(each.num_key_value_heads, each.head_dim) for each in layers]
        assert [(each.num_kv_heads, each.head_dim) for each in config.varied.shapes] == sizes
    elif config.latent is None:
        assert config.num_kv_heads == expected.num_key_value_heads
        assert config.head_dim == (getattr(expected, "head_dim", None) or 256 // 32)
    else:
        assert config.num_kv_heads == 1
        assert config.head_dim == expected.qk_rope_head_dim + expected.kv_lora_rank
        assert config.latent.query_dim == expected.qk_head_dim
        assert config.latent.value_dim == expected.v_head_dim
    assert config.tie_word_embeddings == expected.tie_word_embeddings
    assert config.sliding_windows == windows(expected)
    for rope, kind in zip(config.ropes, layer_types(expected), strict=True):
        if rope is None:
            continue
        parameters = expected.rope_parameters
        parameters = parameters.get(kind, parameters)
        assert rope.theta == parameters["rope_theta"]
        if config.latent is None and config.varied is None:
            assert config.rotary_fraction == parameters.get("partial_rotary_factor", 1.0)
    keys = ("hidden_activation", "hidden_act", "mlp_hidden_act")
    named = (getattr(expected, key, None) for key in keys)
    activation = next((each for each in named if each), "silu")
    renamed = ARCHITECTURES[architecture].legacy_activations
    assert config.traits.activation == renamed.get(activation, activation)


@pytest.mark.parametrize(
    ("architecture", "field", "key"),
    [
        ("GraniteForCausalLM", "attention_scale", "attention_multiplier"),
        ("GraniteForCausalLM", "embedding_scale", "embedding_multiplier"),
        ("GraniteForCausalLM", "residual_scale", "residual_multiplier"),
        ("Gemma2ForCausalLM", "attention_softcap", "attn_logit_softcapping"),
    ],
)
def test_missing_factors_have_the_defaults_of_transformers(architecture, field, key):
    assert getattr(read(architecture).traits, field) == getattr(reference(architecture), key)
    assert getattr(read(architecture, **{key: 0.25}).traits, field) == 0.25
    with pytest.raises(UnsupportedModelError, match=f"{key} .* must be a number above 0"):
        read(architecture, **{key: -1})


def test_the_rotated_part_of_a_head_by_its_dimensions():
    assert read("MiniMaxM2ForCausalLM", rotary_dim=32).rotary_fraction == 0.25
    assert read("MiniMaxM2ForCausalLM", partial_rotary_factor=0.5).rotary_fraction == 0.5
    with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor .* at most 1"):
        read("MiniMaxM2ForCausalLM", rotary_dim=256)


def test_missing_transforms_of_logits_have_the_defaults_of_transformers():
    assert read("GraniteForCausalLM").traits.logits.is_identity
    assert read("GraniteForCausalLM", logits_scaling=8).traits.logits == LogitTransform(1 / 8)
    assert read("CohereForCausalLM").traits.logits == LogitTransform(0.0625)
    assert read("Gemma2ForCausalLM").traits.logits == LogitTransform(softcap=30.0)
    without = read("Gemma2ForCausalLM", final_logit_softcapping=None)
    assert without.traits.logits.is_identity
    assert read("Gemma3ForCausalLM").traits.logits.is_identity


@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "Cohere2ForCausalLM"])
def test_the_period_of_windows_may_be_given(architecture):
    expected = reference(architecture, sliding_window_pattern=3)
    found = read(architecture, sliding_window_pattern=3)
    assert found.sliding_windows == windows(expected)
    assert found.sliding_windows[:3] == (4096, 4096, None)


@pytest.mark.parametrize("given", [None, [1, 0, 1] * 10, [0] * 30])
def test_layers_without_rope_match_transformers(given):
    expected = reference("SmolLM3ForCausalLM", no_rope_layers=given, pad_token_id=0)
    found = read("SmolLM3ForCausalLM", no_rope_layers=given)
    assert [rope is not None for rope in found.ropes] == list(map(bool, expected.no_rope_layers))


def test_cohere2_rotates_with_a_window_only():
    config = read("Cohere2ForCausalLM")
    pairs = zip(config.ropes, config.sliding_windows, strict=True)
    assert all((rope is None) == (window is None) for rope, window in pairs)


def test_gelu_means_its_approximation_in_the_first_gemma():
    gelu = read("GemmaForCausalLM", hidden_act="gelu").traits.activation
    assert gelu is Activation.GELU_TANH


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_null_num_key_value_heads_means_num_attention_heads(architecture):
    config = read(architecture, num_key_value_heads=None)
    assert config.num_kv_heads == (32 if config.latent is None else 1)


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
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "'gelu'; it must be silu or gelu_pytorch_tan"),
        ("Gemma2ForCausalLM", {"hidden_activation": "relu"}, "hidden_activation .* is 'relu'"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("GlmForCausalLM", {"partial_rotary_factor": 1.5}, "is 1.5; it must be at most 1"),
        ("GlmForCausalLM", {"head_dim": 6}, "it must be such that it rotates an even number of"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 2]}, "a list of 30 numbers, 0 or 1"),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 0}, "sliding_window_pattern .* is 0"),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0] * 4}},
            "short_factor .* a list of 4 numbers",
        ),
        ("LlamaForCausalLM", {"hidden_size": "9"}, "hidden_size .* '9'; it must be a whole"),
        ("LlamaForCausalLM", {"vocab_size": 0}, "vocab_size .* is 0; it must be a whole"),
        ("LlamaForCausalLM", {"num_key_value_heads": 5}, r"is 5; it must be a divisor .* \(32\)"),
        ("LlamaForCausalLM", {"head_dim": 7}, "head_dim .* is 7; it must be even"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "ntk"}}, "rope type ntk is not supported"),
        ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window .* 0; it must be a whole"),
        ("MistralForCausalLM", {"layer_types": []}, "must be left out of this architecture"),
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
        ("DeepseekV3ForCausalLM", {"n_group": 256}, "divisor of n_routed_experts .256., at most"),
        ("DeepseekV3ForCausalLM", {"topk_group": 9}, "topk_group .* at most n_group .8."),
        (
            "DeepseekV3ForCausalLM",
            {"n_group": 128, "topk_group": 3},
            "num_experts_per_tok .* is 8; it must be at most 6",
        ),
        ("DeepseekV3ForCausalLM", {"attention_bias": True}, "attention_bias .* must be false"),
        ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, "greedy or group_limited_greedy"),
        ("DeepseekV2ForCausalLM", {"norm_topk_prob": True}, "norm_topk_prob .* must be false"),
        ("DeepseekV3ForCausalLM", {"moe_layer_freq": 2}, "moe_layer_freq .* must be 1"),
    ],
)
def test_unsupported_values_are_rejected_with_the_supported_ones(architecture, changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        read(architecture, **changes)


@pytest.mark.parametrize(
    ("raw", "named", "reason"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; supp", None),
        (
            {"architectures": ["MambaForCausalLM"], "state_size": 16},
            "MambaForCausalLM",
            "state-space layers",
        ),
        ({"model_type": "rwkv"}, "only the model_type 'rwkv'", "state-space layers"),
        (
            {"architectures": ["MiMoV2FlashForCausalLM"], "n_routed_experts": 256},
            "MiMoV2FlashForCausalLM",
            "values narrower than keys",
        ),
        ({"model_type": "zamba2"}, "only the model_type 'zamba2'", "share blocks of attention"),
        (
            {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
            "T5ForConditionalGeneration",
            "an encoder-decoder",
        ),
        ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM", "generates no text"),
        (
            {"architectures": ["KimiLinear2ForCausalLM"], "linear_attn_config": {}},
            "KimiLinear2ForCausalLM",
            "linear attention",
        ),
        (
            {"architectures": ["MiniCPM3ForCausalLM"], "kv_lora_rank": 256},
            "MiniCPM3ForCausalLM",
            "latent attention",
        ),
        (
            {"architectures": ["DbrxForCausalLM"], "num_local_experts": 16},
            "DbrxForCausalLM",
            "mixture of experts",
        ),
        (
            {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}},
            "LlavaForConditionalGeneration",
            "images or audio",
        ),
        (
            {"architectures": ["QWenLMHeadModel"], "auto_map": {"AutoModel": "x.Y"}},
            "QWenLMHeadModel",
            "never executed",
        ),
        ({}, r"names no architecture that is supported \(none\)", None),
    ],
)
def test_other_architectures_are_refused_with_the_reason(raw, named, reason):
    with pytest.raises(UnsupportedModelError, match=named) as caught:
        ModelConfig.from_dict({**SIZES, **raw}, {})
    message = str(caught.value)
    assert reason is None or reason in message
    assert "supported: Llama, Mistral, Qwen2, " in message


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


def test_a_byte_order_mark_and_whole_numbers_as_floats_are_read(tiny_model_dir, tmp_path):
    content = json.loads((tiny_model_dir / "config.json").read_text())
    floats = {
        key: float(content[key])
        for key in ("max_position_embeddings", "hidden_size", "num_hidden_layers", "head_dim")
    }
    text = json.dumps(content | floats)
    (tmp_path / "config.json").write_text(text, encoding="utf-8-sig")
    assert ModelConfig.from_directory(tmp_path) == ModelConfig.from_directory(tiny_model_dir)
    assert type(ModelConfig.from_directory(tmp_path).max_position_embeddings) is int
    half = {"max_position_embeddings": 512.5}
    with pytest.raises(UnsupportedModelError, match=r"max_position_embeddings .* is 512\.5"):
        ModelConfig.from_dict(content | half, {})


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
    assert len(str(caught.value)) < 2000
