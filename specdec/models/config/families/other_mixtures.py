"""Qwen 2 MoE, ERNIE 4.5 MoE, Granite MoE and AFMoE."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specdec.config.json_values import count, positive, unsupported
from specdec.models.config.architecture import Architecture
from specdec.models.config.families.family_traits import (
    gated_shared_experts,
    granite_traits,
    mixtral_experts,
    read_experts,
)
from specdec.models.config.layer_patterns import (
    Windows,
    last_layers_windows,
    no_windows,
    periodic_windows,
    rope_on_windows,
)
from specdec.models.config.traits import DecoderTraits, Experts, Routing, TensorNames


def _qwen2_moe_windows(raw: Mapping[str, Any], num_layers: int) -> Windows:
    """Return windows by `layer_types`, else on each second layer before `max_window_layers`."""
    if not raw.get("use_sliding_window"):
        return no_windows(raw, num_layers)
    if raw.get("layer_types") is not None:
        return last_layers_windows(raw, num_layers)
    window, last = count(raw, "sliding_window"), raw["max_window_layers"]
    return tuple(window if index % 2 == 0 and index < last else None for index in range(num_layers))


def _ernie_moe_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    if raw.get("use_bias"):
        raise unsupported("use_bias", raw["use_bias"], "false: the output head would have one")
    names = TensorNames(choice_bias="moe_statics.e_score_correction_bias")
    return DecoderTraits(is_rope_interleaved=True, names=names)


def _ernie_moe_experts(raw: Mapping[str, Any], num_layers: int) -> Experts:
    every, first, last = (
        raw[f"moe_layer_{name}"] for name in ("interval", "start_index", "end_index")
    )
    stop = num_layers if last == -1 else min(last + 1, num_layers)
    layers = (index for index in range(first, stop) if (index + 1) % every == 0)
    found = read_experts(raw, "moe_num_experts", layers, per_token_key="moe_k")
    return replace(
        found,
        routing=Routing(is_sigmoid=False, has_bias=True, is_bias_a_row=True),
        shared_size=found.intermediate_size * raw["moe_num_shared_experts"],
    )


def _granite_moe_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    return replace(granite_traits(raw), names=TensorNames(mlp="block_sparse_moe", router="router"))


def _afmoe_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    names = TensorNames(
        attention_gate="gate_proj",
        mlp_norm="pre_mlp_layernorm",
        mlp_output_norm="post_mlp_layernorm",
        router="router.gate",
        choice_bias="expert_bias",
    )
    scale = math.sqrt(count(raw, "hidden_size")) if raw.get("mup_enabled") else 1.0
    return DecoderTraits(
        has_output_norms=True, has_attention_gate=True, embedding_scale=scale, names=names
    )


def _afmoe_experts(raw: Mapping[str, Any], num_layers: int) -> Experts:
    found = read_experts(raw, "num_experts", range(raw["num_dense_layers"], num_layers))
    routing = Routing(is_sigmoid=True, has_bias=True, scale=positive(raw, "route_scale"))
    shared_size = found.intermediate_size * count(raw, "num_shared_experts")
    return replace(found, routing=routing, shared_size=shared_size)


OTHER_MIXTURES: Mapping[str, Architecture] = {
    "Qwen2MoeForCausalLM": Architecture(
        "qwen2_moe",
        ("Qwen 1.5 MoE A2.7B", "Qwen 2 57B-A14B"),
        "QKV bias; a mixture with a gated shared expert on all or some layers",
        {
            "num_key_value_heads": 16,
            "qkv_bias": True,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "rms_norm_eps": 1e-6,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
            "num_experts": 60,
        },
        qkv_bias="qkv_bias",
        output_bias=False,
        windows=_qwen2_moe_windows,
        traits=DecoderTraits(names=TensorNames(shared="shared_expert")),
        experts=gated_shared_experts,
    ),
    "Ernie4_5_MoeForCausalLM": Architecture(
        "ernie4_5_moe",
        ("ERNIE 4.5 21B-A3B and 300B-A47B",),
        "as ERNIE 4.5, with a mixture and shared experts; a bias in the choice of experts",
        {
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rope_theta": 500_000.0,
            "moe_intermediate_size": 1536,
            "moe_k": 6,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
        },
        traits=_ernie_moe_traits,
        experts=_ernie_moe_experts,
    ),
    "GraniteMoeForCausalLM": Architecture(
        "granitemoe",
        ("Granite 3.0 and 3.1 1B-A400M, 3B-A800M",),
        "as Granite, with a mixture on each layer",
        {
            **{f"{name}_multiplier": 1.0 for name in ("attention", "embedding", "residual")},
            "logits_scaling": 1.0,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 2048,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        qkv_bias="attention_bias",
        traits=_granite_moe_traits,
        experts=mixtral_experts,
    ),
    "AfmoeForCausalLM": Architecture(
        "afmoe",
        ("Trinity Nano, Mini and Large",),
        "gated attention; norms before and after attention and MLP; queries and keys "
        "normalized by head; windows with rotation on three of four layers, neither on the "
        "others; experts chosen by sigmoids and a bias",
        {
            "head_dim": 128,
            "sliding_window": 1024,
            "global_attn_every_n_layers": 4,
            "moe_intermediate_size": 1408,
            "num_dense_layers": 1,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "num_shared_experts": 2,
            "route_scale": 1.0,
        },
        qkv_bias="attention_bias",
        qk_norm=True,
        windows=periodic_windows(4, "global_attn_every_n_layers"),
        ropes=rope_on_windows,
        traits=_afmoe_traits,
        experts=_afmoe_experts,
    ),
}
