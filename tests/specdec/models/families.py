"""Tiny random checkpoints of every supported family, with all of its features switched on."""

import json

import pytest
import torch
import transformers

from tests.specdec.models.family_features import (
    ALTERNATING,
    BIASES,
    LATENT,
    LLAMA3,
    SIGMOID_EXPERTS,
    WINDOW,
    YARN,
)
from tests.specdec.models.hybrid_families import DELTA_FAMILIES, HYBRIDS, SCALES
from tests.specdec.models.recent_families import RECENT
from tests.specdec.tiny import random_model

MAX_POSITIONS = 256

LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0],
}
GLM = {"rope_parameters": {"rope_theta": 1000.0, "partial_rotary_factor": 0.5}}

FAMILIES = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {**BIASES, "head_dim": 20}),
    "llama3": ("Llama", {"rope_parameters": {"rope_theta": 1000.0, **LLAMA3}}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.5}}),
    "llama-dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": WINDOW}),
    "mistral-window-tied": ("Mistral", {"sliding_window": WINDOW, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_theta": 1e6, **YARN}}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4}}),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3-layers": ("Qwen3", {"attention_bias": True, "use_sliding_window": True, **ALTERNATING}),
    "granite": (
        "Granite",
        {
            **BIASES,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.6,
            "logits_scaling": 2.0,
        },
    ),
    "smollm3": (
        "SmolLM3",
        {
            **BIASES,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "pad_token_id": 0,
        },
    ),
    "olmo2": ("Olmo2", {"attention_bias": True}),
    "olmo3": (
        "Olmo3",
        {
            **ALTERNATING,
            "rope_parameters": {
                "full_attention": {"rope_theta": 5000.0, **YARN},
                "sliding_attention": {"rope_theta": 5000.0, "rope_type": "default"},
            },
        },
    ),
    "phi3": (
        "Phi3",
        {
            "hidden_size": 144,
            "sliding_window": WINDOW,
            "rope_parameters": {**LONG_ROPE, "attention_factor": 1.1},
            "original_max_position_embeddings": 8,
            "pad_token_id": 0,
        },
    ),
    "phi3-short": (
        "Phi3",
        {
            "hidden_size": 144,
            "rope_parameters": LONG_ROPE,
            "original_max_position_embeddings": 200,
            "pad_token_id": 0,
        },
    ),
    "glm": ("Glm", {**GLM, "pad_token_id": 0}),
    "glm4": ("Glm4", {**GLM, "pad_token_id": 0}),
    "gemma": ("Gemma", {"attention_bias": True}),
    "gemma2": (
        "Gemma2",
        {
            **ALTERNATING,
            "attention_bias": True,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 6.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            **ALTERNATING,
            "attention_bias": True,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 6.0,
            "rope_parameters": {
                "full_attention": {"rope_theta": 5000.0, "rope_type": "linear", "factor": 4.0},
                "sliding_attention": {"rope_theta": 300.0, "rope_type": "default"},
            },
        },
    ),
    "starcoder2": ("Starcoder2", {"sliding_window": WINDOW}),
    "cohere": ("Cohere", {"attention_bias": True, "use_qk_norm": True, "logit_scale": 0.5}),
    "cohere2": ("Cohere2", {**ALTERNATING, "attention_bias": True, "logit_scale": 0.5}),
    "seed-oss": ("SeedOss", {**BIASES, "attention_out_bias": True}),
    "ernie4.5": ("Ernie4_5", {"use_bias": True}),
    "stablelm": ("StableLm", {"hidden_size": 144, "use_qkv_bias": True}),
    "stablelm-parallel": ("StableLm", {"hidden_size": 144, "use_parallel_residual": True}),
    "exaone4": ("Exaone4", ALTERNATING),
    "exaone4-full": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "mixtral": ("Mixtral", {"sliding_window": WINDOW, "num_local_experts": 5}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 47,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            **ALTERNATING,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_theta": 1e4, "truncate": False, **YARN},
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {**LATENT, "q_lora_rank": None, "n_shared_experts": 2, "routed_scaling_factor": 1.5},
    ),
    "deepseek-v2-groups": (
        "DeepseekV2",
        {
            **LATENT,
            "q_lora_rank": 21,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **LATENT,
            "q_lora_rank": 21,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {"rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 0.4, **YARN},
        },
    ),
    "glm4-moe": (
        "Glm4Moe",
        {
            "attention_bias": True,
            "use_qk_norm": True,
            "first_k_dense_replace": 1,
            **SIGMOID_EXPERTS,
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "dots1": (
        "Dots1",
        {**SIGMOID_EXPERTS, "n_group": 2, "norm_topk_prob": True, "sliding_window": WINDOW}
        | {"max_window_layers": 2},
    ),
    "minimax-m2": (
        "MiniMaxM2",
        {
            "hidden_size": 144,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "olmoe": (
        "Olmoe",
        {
            "hidden_size": 144,
            "attention_bias": True,
            "num_experts": 6,
            "num_experts_per_tok": 2,
        },
    ),
    **RECENT,
}
"""Names of the tests: the family in transformers, and changes of its configuration."""

NEWER_THAN_KEYS = ("gemma4",)
"""Families without files that have the older keys of rotary embeddings."""

NOT_BY_TRANSFORMERS = {
    "phi3": "LongRoPE",
    "phi3-short": "LongRoPE",
    "stablelm": "takes no attention function",
    "stablelm-parallel": "takes no attention function",
    "mistral4": "no causal language model for mistral4",
    "llama4": "counts the positions",
    "llama4-one-chunk": "counts the positions",
    "llama4-plain": "counts the positions",
    "deepseek-v3.2": "attention with indices",
    "glm5": "attention with indices",
    "gemma4": "heads of different sizes",
    "gemma4-moe": "heads of different sizes",
}
"""Families that transformers' code cannot run here, with the reason in the message."""

BY_TRANSFORMERS = [name for name in FAMILIES if name not in NOT_BY_TRANSFORMERS]

BY_TORCH = ("llama4", "gemma4", "gemma4-moe", "deepseek-v3.2", "glm5")
"""Families that the native decoder does not run; those of Gemma 4 have no draft heads either."""

LLAMA_LIKE = [
    name
    for name, (family, _) in FAMILIES.items()
    if family in ("Llama", "Mistral", "Qwen2", "Qwen3")
]
"""Families without traits of their own."""

WITH_ALL_TRAITS = [
    "granite",
    "olmo3",
    "phi3",
    "gemma2",
    "starcoder2",
    "cohere",
    "qwen3-moe",
    "gpt-oss",
    "deepseek-v3",
    "apertus",
    "ministral3",
    "hunyuan-moe",
    "afmoe",
    "llama4",
    "gemma4",
    "deepseek-v3.2",
]
"""Families that together have every trait."""


def in_make_test(quick):
    """Return all families as parameters of a test; those that are not quick are slow tests."""
    return [
        name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES
    ]


SIZES = {
    "hidden_size": 90,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "intermediate_size": 101,
    "vocab_size": 383,
    "max_position_embeddings": MAX_POSITIONS,
}


def config_class(family):
    """Return the configuration class of a family in transformers."""
    is_text = family in ("Gemma3", "Gemma4", "Llama4", "Qwen3_5", "Qwen3_5Moe")
    name = f"{family}TextConfig" if is_text else f"{family}Config"
    return getattr(transformers, name)


def save_family(directory, name, **changes):
    """Write a tiny random model of a family, without dimensions that divide by two."""
    family, own = {**FAMILIES, **HYBRIDS}[name]
    config = config_class(family)(**{**SIZES, **own, **changes})
    model = random_model(getattr(transformers, f"{family}ForCausalLM"), config, seed=3)
    if family == "Gemma4":  # whose scores have no other factor
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.data *= 0.25
    elif family.startswith(("Gemma", *DELTA_FAMILIES)):  # stores weights of norms less one
        for parameter, weight in model.named_parameters():
            if "norm" in parameter and "linear_attn" not in parameter:
                weight.data -= 1
    for name, bias in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
            torch.nn.init.uniform_(bias, generator=torch.Generator().manual_seed(3))
    if family in SCALES:
        for weight in model.model.layers.parameters():
            if weight.ndim >= 2:
                weight.data *= SCALES[family]
    if family == "GptOss":
        for layer in model.model.layers:
            layer.mlp.experts.gate_up_proj.data *= 3  # some units are clamped
    model.save_pretrained(directory)


def reference_model(directory, dtype=torch.float32):
    """Load the model of transformers, with plain attention and experts."""
    implementations = {"attn_implementation": "eager", "experts_implementation": "eager"}
    (name,) = json.loads((directory / "config.json").read_text())["architectures"]
    model_class = getattr(transformers, name)  # not all of them are known to AutoModelForCausalLM
    return model_class.from_pretrained(directory, dtype=dtype, **implementations).eval()
