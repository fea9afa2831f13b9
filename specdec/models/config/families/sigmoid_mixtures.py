"""Families whose experts are chosen as in DeepSeek-V3: GLM-4.7-Flash, K-EXAONE and Solar Open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specdec.config.json_values import count, overlaid, unsupported
from specdec.models.config.architecture import Architecture
from specdec.models.config.families.family_traits import (
    deepseek_latent,
    deepseek_traits,
    deepseek_v3_experts,
)
from specdec.models.config.layer_patterns import (
    periodic_windows_if_any,
    rope_on_windows_if_any,
)
from specdec.models.config.traits import DecoderTraits, Experts, TensorNames

_DENSE, _SPARSE = "dense", "sparse"


def sparse_layers(raw: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    """Return the layers with a mixture: of `mlp_layer_types`, else from `first_k_dense_replace` on.

    `is_moe_layer` of older files has the same meaning as the types. Raises UnsupportedModelError
    for other types.
    """
    types, older = raw.get("mlp_layer_types"), raw.get("is_moe_layer")
    if types is None and older is not None:
        if len(older) != num_layers or {*older} - {False, True}:
            raise unsupported("is_moe_layer", older, f"{num_layers} times true or false")
        types = [_SPARSE if has else _DENSE for has in older]
    if types is None:
        return frozenset(range(raw["first_k_dense_replace"], num_layers))
    if not isinstance(types, list) or len(types) != num_layers or {*types} - {_DENSE, _SPARSE}:
        raise unsupported("mlp_layer_types", types, f"{num_layers} times {_DENSE} or {_SPARSE}")
    return frozenset(index for index, each in enumerate(types) if each == _SPARSE)


def experts_by_type(raw: Mapping[str, Any], num_layers: int) -> Experts | None:
    """Return the experts of DeepSeek-V3 in the layers of `sparse_layers`."""
    found, layers = deepseek_v3_experts(raw, num_layers), sparse_layers(raw, num_layers)
    return replace(found, layers=layers) if layers else None


def _experts_of_all_layers(raw: Mapping[str, Any], num_layers: int) -> Experts:
    return deepseek_v3_experts(overlaid(raw, first_k_dense_replace=0), num_layers)


def _exaone_canonical(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of K-EXAONE, also of its first files, under the names of DeepSeek-V3."""
    names = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    found = {own: count(raw, theirs) for own, theirs in names.items()}
    if (first := raw.get("first_last_k_dense_replace")) is not None:
        found["first_k_dense_replace"] = first
    return overlaid(raw, **found)


_DEFAULTS = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "first_k_dense_replace": 1}

SIGMOID_MIXTURES: Mapping[str, Architecture] = {
    "Glm4MoeLiteForCausalLM": Architecture(
        "glm4_moe_lite",
        ("GLM-4.7-Flash",),
        "latent attention and experts as in DeepSeek-V3",
        {
            **_DEFAULTS,
            "kv_lora_rank": 512,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "routed_scaling_factor": 1.8,
        },
        traits=deepseek_traits,
        latent=deepseek_latent,
        experts=experts_by_type,
    ),
    "ExaoneMoeForCausalLM": Architecture(
        "exaone_moe",
        ("K-EXAONE 236B-A23B",),
        "as EXAONE 4, with norms before attention and MLP; experts as in DeepSeek-V3",
        {
            **_DEFAULTS,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "num_experts": 64,
            "num_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1024,
            "routed_scaling_factor": 2.5,
        },
        qk_norm=True,
        windows=periodic_windows_if_any(4, "sliding_window_pattern"),
        ropes=rope_on_windows_if_any,
        traits=DecoderTraits(names=TensorNames(choice_bias="e_score_correction_bias")),
        experts=experts_by_type,
        canonical=_exaone_canonical,
    ),
    "SolarOpenForCausalLM": Architecture(
        "solar_open",
        ("Solar Open 100B",),
        "experts as in DeepSeek-V3 on each layer; QKV bias by `attention_bias`",
        {
            **_DEFAULTS,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 1_000_000.0,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1280,
            "routed_scaling_factor": 1.0,
            # No layer has one: every MLP is a mixture.
            "intermediate_size": 1280,
        },
        qkv_bias="attention_bias",
        output_bias=False,
        experts=_experts_of_all_layers,
    ),
}
