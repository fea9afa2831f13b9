"""Ministral 3 and Mistral 4, whose queries grow with their position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specdec.config.json_values import count, overlaid, positive, unsupported
from specdec.models.config.architecture import Architecture
from specdec.models.config.families.family_traits import (
    deepseek_latent,
    deepseek_traits,
    mistral4_experts,
)
from specdec.models.config.layer_patterns import one_window
from specdec.models.config.traits import DecoderTraits, QueryScale

_BETA, _FRACTION = "llama_4_scaling_beta", "partial_rotary_factor"
_MSCALES = {"mscale": 1.0, "mscale_all_dim": 1.0}


def _canonical(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys with the factor of queries beside the rotary embedding."""
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    given = raw[name]
    if not isinstance(given, dict):
        return raw
    rope = {key: value for key, value in given.items() if key != "max_position_embeddings"}
    beta = rope.pop(_BETA, None)
    return overlaid(raw, **{name: rope, _BETA: beta})


def _mistral4_canonical(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys without the part of a head that is rotated, which sizes of latents give."""
    rope_dim, plain_dim = (count(raw, f"qk_{part}_head_dim") for part in ("rope", "nope"))
    only, found = rope_dim / (rope_dim + plain_dim), _canonical(raw)
    ropes = {
        name: dict(found[name])
        for name in ("rope_scaling", "rope_parameters")
        if isinstance(found.get(name), dict)
    }
    given = [each.pop(_FRACTION, None) for each in ropes.values()]
    for fraction in (*given, found.get(_FRACTION)):
        if fraction not in (None, only):
            raise unsupported(_FRACTION, fraction, str(only))
    return overlaid(found, **ropes, **{_FRACTION: None})


def _traits(raw: Mapping[str, Any]) -> DecoderTraits:
    return DecoderTraits(query_scale=_query_scale(raw))


def _mistral4_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    return replace(deepseek_traits(raw), query_scale=_query_scale(raw))


def _query_scale(raw: Mapping[str, Any]) -> QueryScale | None:
    if raw.get(_BETA) is None:
        return None
    rope = raw.get("rope_scaling") or raw["rope_parameters"]
    return QueryScale(positive(raw, _BETA), positive(rope, "original_max_position_embeddings"))


def _yarn(theta: float, factor: float, original: int) -> Mapping[str, Any]:
    """Return the rotary embedding of a config.json without one."""
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": original,
        _BETA: 0.1,
        **_MSCALES,
    }


MISTRAL: Mapping[str, Architecture] = {
    "Ministral3ForCausalLM": Architecture(
        "ministral3",
        ("Ministral 3 3B, 8B and 14B",),
        "as Mistral; queries multiplied by a factor that grows with their position",
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "sliding_window": None,
            "rope_parameters": _yarn(1_000_000.0, 16.0, 16_384),
        },
        windows=one_window,
        traits=_traits,
        canonical=_canonical,
    ),
    "Mistral4ForCausalLM": Architecture(
        "mistral4",
        ("Mistral Small 4",),
        "latent attention and a mixture as in DeepSeek-V3, of softmax scores without a bias; "
        "queries as in Ministral 3",
        {
            "kv_lora_rank": 256,
            "q_lora_rank": 1024,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "rms_norm_eps": 1e-6,
            "first_k_dense_replace": 0,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "moe_intermediate_size": 2048,
            "rope_parameters": _yarn(10_000.0, 128.0, 8192),
        },
        traits=_mistral4_traits,
        latent=deepseek_latent,
        experts=mistral4_experts,
        canonical=_mistral4_canonical,
    ),
}
