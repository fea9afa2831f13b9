"""Tiny random checkpoints of families that have appeared since 2025; see `families`."""

from tests.specdec.models.family_features import (
    ALPHA,
    ALTERNATING,
    BIASES,
    LATENT,
    LLAMA3,
    QUERY_SCALE,
    SIGMOID_EXPERTS,
    WINDOW,
    YARN,
)

RECENT = {
    "apertus": (
        "Apertus",
        {"attention_bias": True, "rope_parameters": {"rope_theta": 1000.0, **LLAMA3}},
    ),
    "arcee": ("Arcee", BIASES),
    "ministral3": ("Ministral3", {"rope_parameters": QUERY_SCALE, "sliding_window": WINDOW}),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "hidden_size": 144,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 47,
            "shared_expert_intermediate_size": 31,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "ernie4.5-moe": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 25,
            "moe_layer_interval": 2,
        },
    ),
    "granite-moe": (
        "GraniteMoe",
        {
            "hidden_size": 144,
            "attention_bias": True,
            "num_local_experts": 5,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.6,
            "logits_scaling": 2.0,
        },
    ),
    "afmoe": (
        "Afmoe",
        {
            **ALTERNATING,
            "attention_bias": True,
            "mup_enabled": True,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 25,
            "route_scale": 1.5,
        },
    ),
    "gemma4": (
        "Gemma4",
        {
            "num_hidden_layers": 6,
            "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
            "sliding_window": WINDOW,
            "attention_bias": True,
            "global_head_dim": 22,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 383,
            "final_logit_softcapping": 6.0,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 5000.0,
                    "partial_rotary_factor": 0.5,
                },
                "sliding_attention": {"rope_theta": 300.0, "rope_type": "default"},
            },
        },
    ),
    "gemma4-moe": (
        "Gemma4",
        {
            **ALTERNATING,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_hidden_layers": 4,
            "global_head_dim": 22,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 25,
            "tie_word_embeddings": False,
        },
    ),
    "llama4": (
        "Llama4",
        {
            "attention_bias": True,
            "intermediate_size_mlp": 83,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "moe_layers": [0, 2],
            "no_rope_layers": [1, 0, 1],
            "attention_chunk_size": WINDOW,
            "floor_scale": 9,
            "attn_scale": 0.7,
            "rope_parameters": {"rope_theta": 1000.0, **LLAMA3, "high_freq_factor": 1.0},
        },
    ),
    "llama4-one-chunk": (
        "Llama4",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 2,
            "floor_scale": 9,
        },
    ),
    "llama4-plain": (
        "Llama4",
        {
            "num_local_experts": 5,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
        },
    ),
    "mistral4": (
        "Mistral4",
        {
            **LATENT,
            "head_dim": 24,
            "q_lora_rank": 21,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {**QUERY_SCALE, "mscale": 0.7, "mscale_all_dim": 0.4},
        },
    ),
    "hunyuan": ("HunYuanDenseV1", {"attention_bias": True, "rope_parameters": ALPHA}),
    "hunyuan-moe": (
        "HunYuanMoEV1",
        {"attention_bias": True, "rope_parameters": ALPHA, "num_experts": 6, "moe_topk": [2] * 3},
    ),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        {
            **LATENT,
            "q_lora_rank": 21,
            "n_group": 4,
            "topk_group": 2,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "rope_parameters": {"rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 0.4, **YARN},
        },
    ),
    "exaone-moe": (
        "ExaoneMoe",
        {
            **ALTERNATING,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 25,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "solar-open": ("SolarOpen", {**SIGMOID_EXPERTS, "attention_bias": True, "n_group": 2}),
}
"""Names of the tests: the family in transformers, and changes of its configuration."""
