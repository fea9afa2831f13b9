"""The text model of Gemma 4."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from specdec.config.json_values import count, overlaid, positive_or_none, unsupported
from specdec.models.config.architecture import Architecture
from specdec.models.config.attention.varied_layers import AttentionShape, VariedLayers
from specdec.models.config.families.family_traits import read_experts
from specdec.models.config.layer_patterns import LayerRopes, Windows, periodic_windows
from specdec.models.config.rope import ProportionalRope, Rope, read_rope
from specdec.models.config.traits import (
    Activation,
    DecoderTraits,
    Experts,
    LogitTransform,
    TensorNames,
)

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPES: Mapping[str, Mapping[str, Any]] = {
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def _canonical(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys with full attention in the last layer, which every model has."""
    types, num_layers = raw.get("layer_types"), count(raw, "num_hidden_layers")
    if types is None:
        types = [_SLIDING if (index + 1) % 6 else _FULL for index in range(num_layers)]
    if not isinstance(types, list) or not types:
        raise unsupported("layer_types", types, f"{num_layers} times {_SLIDING} or {_FULL}")
    return overlaid(raw, layer_types=[*types[:-1], _FULL])


def _varied(raw: Mapping[str, Any], num_layers: int) -> VariedLayers:
    types, size = raw["layer_types"], count(raw, "intermediate_size")
    num_shared = raw["num_kv_shared_layers"]
    if type(num_shared) is not int or not 0 <= num_shared < num_layers:
        raise unsupported("num_kv_shared_layers", num_shared, f"from 0 to {num_layers - 1}")
    num_own = num_layers - num_shared
    last = {kind: index for index, kind in enumerate(types[:num_own])}
    if num_shared and {*types} - last.keys():
        limit = "such that each type of layer has one with keys and values"
        raise unsupported("num_kv_shared_layers", num_shared, limit)
    sources = (index if index < num_own else last[types[index]] for index in range(num_layers))
    wide = 2 * size if raw["use_double_wide_mlp"] else size
    return VariedLayers(
        shapes=tuple(_shape(raw, index, each) for index, each in enumerate(types)),
        kv_layers=tuple(sources),
        mlp_sizes=tuple(size if index < num_own else wide for index in range(num_layers)),
        input_size=raw["hidden_size_per_layer_input"] or 0,
        num_inputs=count(raw, "vocab_size_per_layer_input"),
    )


def _shape(raw: Mapping[str, Any], index: int, kind: str) -> AttentionShape:
    """Return the attention of a layer: transformers 5 writes what differs by layer."""
    by_layer = raw.get("per_layer_config") or {}  # by indices with leading zeros
    own = next((dict(each) for name, each in by_layer.items() if int(name) == index), {})
    if kind == _FULL and not by_layer:
        own.setdefault("head_dim", None if "head_dim" in own else raw["global_head_dim"])
        if raw["attention_k_eq_v"] and raw.get("num_global_key_value_heads") is not None:
            own.setdefault("num_key_value_heads", raw["num_global_key_value_heads"])
    num_heads = count(raw, "num_attention_heads")
    num_kv_heads = count(own, "num_key_value_heads", count(raw, "num_key_value_heads", num_heads))
    has_values = kind == _SLIDING or not raw["attention_k_eq_v"]
    return AttentionShape(num_kv_heads, count(own, "head_dim", raw["head_dim"]), has_values)


def _ropes(raw: Mapping[str, Any], windows: Windows) -> LayerRopes:
    given = raw.get("rope_parameters") or _ROPES
    if not isinstance(given, Mapping) or set(given) != {_FULL, _SLIDING}:
        raise unsupported("rope_parameters", given, f"one of {_FULL} and one of {_SLIDING}")
    positions = {"max_position_embeddings": raw["max_position_embeddings"]}
    found: dict[str, Rope] = {}
    for kind in (_FULL, _SLIDING):
        rope = given[kind]
        if rope.get("rope_type") == "proportional":
            fraction, theta = rope.get("partial_rotary_factor", 1.0), rope["rope_theta"]
            found[kind] = ProportionalRope(theta, fraction, rope.get("factor", 1.0))
        else:
            found[kind] = read_rope({**positions, "rope_parameters": rope})
    return tuple(found[_FULL if window is None else _SLIDING] for window in windows)


def _traits(raw: Mapping[str, Any]) -> DecoderTraits:
    return DecoderTraits(
        has_output_norms=True,
        attention_scale=1.0,
        embedding_scale=math.sqrt(count(raw, "hidden_size")),
        rounds_embedding_scale=True,
        logits=LogitTransform(softcap=positive_or_none(raw, "final_logit_softcapping")),
        names=TensorNames(mlp_norm="pre_feedforward_layernorm", router="router.proj", mixture=""),
    )


def _experts(raw: Mapping[str, Any], num_layers: int) -> Experts | None:
    if not raw["enable_moe_block"]:
        return None
    return read_experts(raw, "num_experts", range(num_layers), per_token_key="top_k_experts")


GEMMA4: Mapping[str, Architecture] = {
    "Gemma4ForCausalLM": Architecture(
        "gemma4_text",
        ("Gemma 4 E2B, E4B, 26B-A4B and 31B (text)",),
        "as Gemma 3; heads of another size in the layers with full attention, whose keys may "
        "be their values; last layers that read the KV of earlier ones; a vector of each token "
        "for each layer; experts beside the MLP",
        {
            "vocab_size": 262_144,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "global_head_dim": 512,
            "hidden_activation": Activation.GELU_TANH.value,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "sliding_window": 512,
            "vocab_size_per_layer_input": 262_144,
            "hidden_size_per_layer_input": 256,
            "attention_k_eq_v": False,
            "num_kv_shared_layers": 0,
            "enable_moe_block": False,
            "use_double_wide_mlp": False,
        },
        activation_key="hidden_activation",
        qkv_bias="attention_bias",
        qk_norm=True,
        windows=periodic_windows(6),
        ropes=_ropes,
        traits=_traits,
        experts=_experts,
        varied=_varied,
        canonical=_canonical,
    ),
}
