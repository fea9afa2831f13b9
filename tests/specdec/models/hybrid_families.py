"""Tiny random checkpoints of the families with recurrent layers; see `families`."""

DELTA = {
    "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-3,  # else norms of outputs near 0 enlarge rounding errors
    "rope_parameters": {
        "rope_theta": 1000.0,
        "rope_type": "default",
        "partial_rotary_factor": 0.5,
    },
}

GRANITE_4 = {
    "num_hidden_layers": 4,
    "head_dim": 10,
    "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
    "num_local_experts": 0,
    "shared_intermediate_size": 101,
    "mamba_n_heads": 6,
    "mamba_d_state": 14,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 1.7,
    "residual_multiplier": 0.6,
    "logits_scaling": 1.3,
}

DELTA_FAMILIES = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe")

SCALES = {"Qwen3Next": 0.4, "Qwen3_5": 0.4, "Qwen3_5Moe": 0.4, "GraniteMoeHybrid": 0.4}
"""Factors of weights of families in which rounding errors otherwise grow with each layer."""

HYBRIDS = {
    "lfm2": (
        "Lfm2",
        {
            "num_hidden_layers": 5,
            "full_attn_idxs": [1, 3],
            "conv_L_cache": 4,
            "conv_bias": True,
            "block_multiple_of": 7,
            "block_ffn_dim_multiplier": 1.3,
            "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
        },
    ),
    "lfm2-plain": (
        "Lfm2",
        {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}
        | {"tie_word_embeddings": False},
    ),
    "qwen3-next": (
        "Qwen3Next",
        {
            **DELTA,
            "attention_bias": True,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 25,
            "shared_expert_intermediate_size": 31,
            "mlp_only_layers": [1],
        },
    ),
    "granite-4": (
        "GraniteMoeHybrid",
        {
            **GRANITE_4,
            "attention_bias": True,
            "mamba_proj_bias": True,
            "position_embedding_type": "rope",
            "mamba_n_groups": 3,
        },
    ),
    "granite-4-plain": ("GraniteMoeHybrid", {**GRANITE_4, "tie_word_embeddings": True}),
    "granite-4-moe": (
        "GraniteMoeHybrid",
        {
            **GRANITE_4,
            "intermediate_size": 25,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 31,
        },
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        {
            "num_hidden_layers": 5,
            "layer_types": ["conv", "full_attention", "conv", "full_attention", "conv"],
            "num_dense_layers": 2,
            "moe_intermediate_size": 25,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 1.5,
        },
    ),
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        {
            **DELTA,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 25,
            "shared_expert_intermediate_size": 31,
        },
    ),
    "qwen3.5": ("Qwen3_5", {**DELTA, "layer_types": None, "full_attention_interval": 2}),
}
"""Families with recurrent layers, likewise; torch alone runs them."""
