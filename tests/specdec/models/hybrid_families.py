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

KIMI_LAYERS = [*["linear_attention"] * 2, "full_attention", "linear_attention", "full_attention"]

ONE_BLOCKS = ("linear_attention", "moe", "full_attention", "mlp")

MAMBA = {"mamba_n_heads": 6, "mamba_d_state": 14, "rms_norm_eps": 1e-3}

FALCON_FACTORS = {
    "embedding_multiplier": 1.7,
    "lm_head_multiplier": 0.6,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 0.9,
    "ssm_out_multiplier": 1.2,
    "ssm_multipliers": [0.8, 1.2, 0.7, 1.3, 0.9],
    "mlp_multipliers": [1.4, 0.7],
}

DELTA_FAMILIES = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe")

SCALES = {"Qwen3Next": 0.4, "Qwen3_5": 0.4, "Qwen3_5Moe": 0.4, "GraniteMoeHybrid": 0.4}
SCALES |= {"NemotronH": 0.4, "FalconH1": 0.4, "Bamba": 0.4, "OlmoHybrid": 0.25}
SCALES |= {"KimiLinear": 0.4, "Jamba": 0.4}
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
    "nemotron-h": (
        "NemotronH",
        {
            "layers_block_type": [*ONE_BLOCKS, *ONE_BLOCKS, "linear_attention"],
            "layer_norm_epsilon": 1e-3,
            "ssm_state_size": 14,
            "mamba_num_heads": 6,
            "mamba_head_dim": 11,
            "n_groups": 3,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 25,
            "moe_shared_expert_intermediate_size": 31,
            "moe_latent_size": 22,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    "nemotron-h-dense": (
        "NemotronH",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "layer_norm_epsilon": 1e-3,
            "ssm_state_size": 14,
            "mamba_num_heads": 6,
            "mamba_head_dim": 11,
            "n_groups": 2,
            "mlp_bias": True,
            "use_bias": True,
            "use_conv_bias": False,
        },
    ),
    "falcon-h1": (
        "FalconH1",
        {
            **MAMBA,
            "mamba_d_ssm": 66,
            "mamba_n_groups": 3,
            "mamba_rms_norm": True,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            **FALCON_FACTORS,
        },
    ),
    "falcon-h1-plain": (
        "FalconH1",
        {**MAMBA, "mamba_d_ssm": None, "mamba_conv_bias": False, "tie_word_embeddings": True},
    ),
    "falcon-h1-gate-first": (
        "FalconH1",
        {**MAMBA, "mamba_d_ssm": 66, "mamba_rms_norm": True, "mamba_norm_before_gate": False}
        | FALCON_FACTORS,
    ),
    "kimi-linear": (
        "KimiLinear",
        {
            "num_hidden_layers": 5,
            "layer_types": KIMI_LAYERS,
            "num_key_value_heads": 9,
            "kv_lora_rank": 34,
            "qk_rope_head_dim": 6,
            "qk_nope_head_dim": 18,
            "v_head_dim": 13,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 25,
            "n_group": 3,
            "topk_group": 2,
            "linear_head_dim": 10,
            "linear_num_heads": 6,
            "rms_norm_eps": 1e-3,
            "pad_token_id": 0,
        },
    ),
    "jamba": (
        "Jamba",
        {
            "num_hidden_layers": 5,
            "rms_norm_eps": 1e-3,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "mamba_d_state": 7,
            "mamba_proj_bias": True,
        },
    ),
    "jamba-dense": (
        "Jamba",
        {"rms_norm_eps": 1e-3, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 1}
        | {"mamba_conv_bias": False},
    ),
    "olmo-hybrid": (
        "OlmoHybrid",
        {
            **DELTA,
            "attention_bias": True,
            "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
            "pad_token_id": 0,
        },
    ),
    "olmo-hybrid-plain": (
        "OlmoHybrid",
        {
            "num_hidden_layers": 4,
            "rms_norm_eps": 1e-3,
            "linear_allow_neg_eigval": False,
            "rope_parameters": {"rope_theta": None, "rope_type": "default"},
            "pad_token_id": 0,
        },
    ),
    "bamba": (
        "Bamba",
        {**MAMBA, "num_hidden_layers": 4, "attn_layer_indices": [2], "mamba_n_groups": 2},
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

QUICK = (
    *("lfm2", "lfm2-plain", "qwen3-next", "qwen3.5", "granite-4", "granite-4-plain"),
    *("nemotron-h", "falcon-h1", "kimi-linear", "jamba"),
)
"""Families that have every kind of recurrence, and of a layer around it."""
