# Modules: specdec.models.config.hybrids.families, specdec.models.config.recurrent
# Modules: specdec.models.config.hybrids.convolutions, specdec.models.config.hybrids.delta_rules
# Modules: specdec.models.config.hybrids.state_spaces, specdec.models.config.hybrids.layer_types
# Modules: specdec.models.config.hybrids.jamba, specdec.models.config.hybrids.nemotron
# Modules: specdec.models.config.hybrids.kimi
"""Configurations of families with recurrent layers: published files, and what is refused."""

import pytest

from specdec.models.config.model_config import ModelConfig
from specdec.types.errors import UnsupportedModelError

PUBLISHED = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}


SIZE = {"intermediate_size": 96}
KIMI = {
    **SIZE,
    "rms_norm_eps": 1e-5,
    "linear_attn_config": {"full_attn_layers": [3], "num_heads": 8},
}
NEMOTRON = {"hybrid_override_pattern": "M*E"}
MIXED = ["mamba", "attention", "mamba", "mamba"]


@pytest.mark.parametrize(
    ("architecture", "changes", "layers"),
    [
        ("Lfm2ForCausalLM", {"full_attn_idxs": [2]}, {0, 1, 3}),
        ("Qwen3NextForCausalLM", {}, {0, 1, 2}),
        ("Qwen3_5ForCausalLM", {"full_attention_interval": 2}, {0, 2}),
        (
            "GraniteMoeHybridForCausalLM",
            {
                "layer_types": MIXED,
                "num_local_experts": 0,
                "mamba_n_heads": 8,
                "mamba_d_head": 16,
            },
            {0, 2, 3},
        ),
        ("Lfm2MoeForCausalLM", {**SIZE, "full_attn_idxs": [2]}, {0, 1, 3}),
        ("Qwen3_5MoeForCausalLM", {}, {0, 1, 2}),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M-*EMM"}, {0, 4, 5}),
        ("OlmoHybridForCausalLM", {}, {0, 1, 2}),
        ("JambaForCausalLM", {**SIZE, "attn_layer_period": 4, "attn_layer_offset": 1}, {0, 2, 3}),
        (
            "KimiLinearForCausalLM",
            KIMI,
            {0, 1, 3},
        ),
        (
            "BambaForCausalLM",
            {**SIZE, "mamba_n_heads": 8, "attn_layer_indices": [1]},
            {0, 2, 3},
        ),
        ("FalconH1ForCausalLM", {**SIZE, "mamba_d_ssm": 64, "mamba_n_heads": 8}, {0, 1, 2, 3}),
    ],
)
def test_layers_of_published_files(architecture, changes, layers):
    raw = {**PUBLISHED, "architectures": [architecture], **changes}
    recurrent = ModelConfig.from_dict(raw, {}).recurrent
    assert recurrent is not None
    assert recurrent.layers == layers


def test_the_mlp_of_published_lfm2_files():
    """That of LFM2-1.2B: two thirds of `block_ff_dim`, rounded up."""
    raw = {
        **PUBLISHED,
        "architectures": ["Lfm2ForCausalLM"],
        "full_attn_idxs": [2],
        "block_ff_dim": 12288,
        "tie_embedding": False,
    }
    config = ModelConfig.from_dict(raw, {})
    assert config.intermediate_size == 8192
    assert not config.tie_word_embeddings


def test_multimodal_rotation_of_a_text_is_the_plain_one():
    rope = {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 0.25}
    raw = {**PUBLISHED, "architectures": ["Qwen3_5ForCausalLM"], "rope_parameters": rope}
    sections = {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    multimodal = raw | {"rope_parameters": rope | sections}
    assert ModelConfig.from_dict(raw, {}) == ModelConfig.from_dict(multimodal, {})


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("Lfm2ForCausalLM", {"layer_types": ["conv"] * 4}, "layer_types"),
        ("Qwen3NextForCausalLM", {"layer_types": ["full_attention"] * 4}, "layer_types.*both"),
        ("Lfm2ForCausalLM", {"full_attn_idxs": [1], "conv_L_cache": 1}, "conv_L_cache.*from 2"),
        ("Qwen3NextForCausalLM", {"linear_num_value_heads": 24}, "a multiple of"),
        ("Qwen3NextForCausalLM", {"linear_conv_kernel_dim": 65}, "from 2 to 64"),
        ("Qwen3_5ForCausalLM", {"layer_types": ["mamba"] * 4}, "linear_attention or full"),
        (
            "GraniteMoeHybridForCausalLM",
            {"mamba_n_heads": 8, "layer_types": MIXED, "num_experts_per_tok": 9},
            "num_experts_per_tok.*at most num_local_experts",
        ),
        (
            "Lfm2MoeForCausalLM",
            {**SIZE, "full_attn_idxs": [2], "num_experts": 3},
            "num_experts_per_tok.*at most num_experts",
        ),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M*X"}, "pattern .*'M.X'.*M, .*E,"),
        ("NemotronHForCausalLM", {"layers_block_type": ["mlp"]}, "layers_block_type"),
        ("NemotronHForCausalLM", {**NEMOTRON, "mlp_bias": True}, "mlp_bias .* is True.*experts"),
        ("NemotronHForCausalLM", {**NEMOTRON, "attention_bias": True}, "attention_bias.*false"),
        ("NemotronHForCausalLM", {**NEMOTRON, "mlp_hidden_act": "relu"}, "mlp_hidden_act"),
        ("NemotronHForCausalLM", {**NEMOTRON, "n_groups": 3}, "n_groups .*mamba_num_heads"),
        ("FalconH1ForCausalLM", {**SIZE, "ssm_multipliers": [1.0]}, "ssm_multipliers .*5 numbers"),
        ("FalconH1ForCausalLM", {**SIZE, "mlp_multipliers": [1.0, 0.0]}, "mlp_multipliers .*above"),
        ("FalconH1ForCausalLM", {**SIZE, "mamba_d_ssm": 65}, "mamba_d_head .*65 / mamba_n_heads"),
        ("BambaForCausalLM", {**SIZE, "mamba_n_heads": 8}, "layer_types"),
        ("JambaForCausalLM", {**SIZE, "attn_layer_offset": 8}, "attn_layer_offset .*from 0 to .*7"),
        ("JambaForCausalLM", {**SIZE}, "layer_types"),
        ("KimiLinearForCausalLM", {**KIMI, "mla_use_nope": False}, "mla_use_nope.*true"),
        ("KimiLinearForCausalLM", {**KIMI, "linear_attn_config": 3}, "linear_attn_config"),
        ("KimiLinearForCausalLM", {**KIMI, "mlp_layer_types": ["moe"]}, "dense or sparse"),
        (
            "GraniteMoeHybridForCausalLM",
            {"num_local_experts": 0, "time_step_limit": [0.1, 1.0]},
            "time_step_limit",
        ),
        (
            "GraniteMoeHybridForCausalLM",
            {"num_local_experts": 0, "mamba_n_heads": 3},
            "mamba_d_head",
        ),
        (
            "GraniteMoeHybridForCausalLM",
            {"num_local_experts": 0, "mamba_n_heads": 8, "mamba_n_groups": 3},
            "a divisor of mamba_n_heads",
        ),
    ],
)
def test_invalid_sizes_are_refused(architecture, changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        ModelConfig.from_dict({**PUBLISHED, "architectures": [architecture], **changes}, {})


def test_the_tail_of_8_guesses_of_published_sizes():
    """At most an eighth of the state of Gated DeltaNet (Qwen3-Next 80B-A3B, bfloat16)."""
    sizes = {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16}
    raw = {**PUBLISHED, **sizes, "architectures": ["Qwen3NextForCausalLM"]}
    recurrent = ModelConfig.from_dict(raw, {}).recurrent
    assert recurrent is not None
    state, guess = recurrent.rank_bytes("bfloat16", 0, 1)
    assert state == 36 * (32 * 128 * 128 * 4 + 3 * (8192 + 64) * 2)
    assert 8 * guess <= state / 8
