"""Keys of config.json that the tiny checkpoints of several families have; see `families`."""

WINDOW = 7
"""Shorter than every sequence, and not a multiple of a block."""

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
ALTERNATING = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

BIASES = {"attention_bias": True, "mlp_bias": True}
LATENT = {
    "head_dim": 6,
    "num_key_value_heads": 9,
    "kv_lora_rank": 34,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 18,
    "v_head_dim": 13,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 25,
    "first_k_dense_replace": 1,
}
SIGMOID_EXPERTS = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 25,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
QUERY_SCALE = {**YARN, "rope_theta": 1e4, "llama_4_scaling_beta": 0.7} | {
    "original_max_position_embeddings": 9
}
ALPHA = {"rope_type": "dynamic", "rope_theta": 1e3, "factor": 1.0, "alpha": 40.0}
