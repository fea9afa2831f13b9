"""Registry of the supported architectures with mixtures of experts, a part of `registry`."""

from __future__ import annotations

from collections.abc import Mapping

from specdec.models.config.architecture import Architecture
from specdec.models.config.families.family_traits import (
    MIXTRAL_NAMES,
    deepseek_latent,
    deepseek_traits,
    deepseek_v2_experts,
    deepseek_v3_experts,
    gpt_oss_experts,
    gpt_oss_traits,
    minimax_m2_experts,
    mixtral_experts,
    olmoe_experts,
    qwen3_moe_experts,
)
from specdec.models.config.layer_patterns import (
    last_layers_windows,
    one_window,
    periodic_windows,
    window_if_used,
)
from specdec.models.config.rope import rotary_fraction, rotary_fraction_of_dim
from specdec.models.config.traits import Activation, DecoderTraits, QkNorm

_DEEPSEEK_DEFAULTS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-6,
    "first_k_dense_replace": 0,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
}
_SIGMOID_EXPERTS_DEFAULTS = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}

MIXTURES: Mapping[str, Architecture] = {
    "MixtralForCausalLM": Architecture(
        "mixtral",
        ("Mixtral 8x7B and 8x22B",),
        "a mixture of experts on each layer; one sliding window for all layers, or none",
        {
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": None,
            "rope_theta": 1_000_000.0,
        },
        windows=one_window,
        traits=DecoderTraits(names=MIXTRAL_NAMES),
        experts=mixtral_experts,
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe",
        ("Qwen 3 30B-A3B and 235B-A22B",),
        "as Qwen 3, with a mixture of experts on all or some layers",
        {
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
        },
        qkv_bias="attention_bias",
        qk_norm=True,
        windows=window_if_used,
        experts=qwen3_moe_experts,
    ),
    "DeepseekV2ForCausalLM": Architecture(
        "deepseek_v2",
        ("DeepSeek-V2, V2-Lite, V2.5, Coder-V2",),
        "latent attention; a mixture with shared experts after the first layers",
        {**_DEEPSEEK_DEFAULTS, "topk_method": "greedy", "routed_scaling_factor": 1.0},
        traits=deepseek_traits,
        latent=deepseek_latent,
        experts=deepseek_v2_experts,
    ),
    "DeepseekV3ForCausalLM": Architecture(
        "deepseek_v3",
        ("DeepSeek-V3, V3.1, R1", "Kimi K2", "Moonlight"),
        "as DeepSeek-V2; experts chosen by groups, with sigmoids and a bias",
        {
            **_DEEPSEEK_DEFAULTS,
            "n_group": 8,
            "topk_group": 4,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3,
        },
        traits=deepseek_traits,
        latent=deepseek_latent,
        experts=deepseek_v3_experts,
    ),
    "Glm4MoeForCausalLM": Architecture(
        "glm4_moe",
        ("GLM-4.5, 4.5-Air, 4.6, 4.7",),
        "rotation of half of each head; queries and keys normalized by `use_qk_norm`; experts "
        "as in DeepSeek-V3",
        {
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5,
            **_SIGMOID_EXPERTS_DEFAULTS,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        qkv_bias="attention_bias",
        output_bias=False,
        qk_norm="use_qk_norm",
        rotary_fraction=rotary_fraction,
        experts=deepseek_v3_experts,
    ),
    "Dots1ForCausalLM": Architecture(
        "dots1",
        ("dots.llm1",),
        "queries and keys normalized by head; windows on the last layers; experts as in "
        "DeepSeek-V3",
        {
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
            "max_window_layers": 62,
            "use_sliding_window": True,
            **_SIGMOID_EXPERTS_DEFAULTS,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "moe_intermediate_size": 1408,
        },
        qkv_bias="attention_bias",
        qk_norm=True,
        windows=last_layers_windows,
        experts=deepseek_v3_experts,
    ),
    "MiniMaxM2ForCausalLM": Architecture(
        "minimax_m2",
        ("MiniMax-M2, M2.1",),
        "a mixture of experts on each layer, chosen by sigmoids and a bias; rotation of a part "
        "of each head; queries and keys normalized over all heads",
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 5_000_000.0,
            "rms_norm_eps": 1e-6,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
        },
        qk_norm=True,
        rotary_fraction=rotary_fraction_of_dim,
        traits=DecoderTraits(qk_norm=QkNorm.ALL_HEADS, names=MIXTRAL_NAMES),
        experts=minimax_m2_experts,
    ),
    "OlmoeForCausalLM": Architecture(
        "olmoe",
        ("OLMoE 1B-7B",),
        "a mixture of experts on each layer; queries and keys normalized over all heads",
        {"num_experts_per_tok": 8, "num_experts": 64},
        qkv_bias="attention_bias",
        qk_norm=True,
        traits=DecoderTraits(qk_norm=QkNorm.ALL_HEADS),
        experts=olmoe_experts,
    ),
    "GptOssForCausalLM": Architecture(
        "gpt_oss",
        ("GPT-OSS 20B and 120B",),
        "a mixture of experts with biases on each layer, in 4 bits (MXFP4) in the published "
        "files; clamped SwiGLU; attention sinks; windows on alternating layers",
        {
            "head_dim": 64,
            "num_key_value_heads": 8,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "rope_theta": 150_000.0,
            "attention_bias": True,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        legacy_activations={"silu": Activation.CLAMPED_SWIGLU},
        qkv_bias="attention_bias",
        windows=periodic_windows(2),
        traits=gpt_oss_traits,
        experts=gpt_oss_experts,
    ),
}
