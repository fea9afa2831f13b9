"""The text model of Llama 4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specdec.config.json_values import count, overlaid, positive, unsupported
from specdec.models.config.architecture import Architecture
from specdec.models.config.families.family_traits import read_experts
from specdec.models.config.layer_patterns import layers_with_rope, rope_on_some_layers
from specdec.models.config.traits import (
    DecoderTraits,
    Experts,
    QkNorm,
    QueryScale,
    Routing,
    TensorNames,
)

_CHUNKED, _FULL = "chunked_attention", "full_attention"


def _canonical(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys with the sizes of dense layers and of experts under the usual names.

    Raises UnsupportedModelError where other layers than those with rotary embedding are chunked.
    """
    found = overlaid(
        raw,
        no_rope_layers=raw.get("no_rope_layers") or None,
        moe_intermediate_size=count(raw, "intermediate_size"),
        intermediate_size=count(raw, "intermediate_size_mlp"),
    )
    has_rope = layers_with_rope(found, count(raw, "num_hidden_layers"))
    only, types = [_CHUNKED if has else _FULL for has in has_rope], raw.get("layer_types")
    if types is not None and types != only:
        limit = f"{_CHUNKED} on the layers with rotary embedding, {_FULL} on the others"
        raise unsupported("layer_types", types, limit)
    return found


def _traits(raw: Mapping[str, Any]) -> DecoderTraits:
    scale = None
    if raw["attn_temperature_tuning"]:
        beta, length = positive(raw, "attn_scale"), positive(raw, "floor_scale")
        scale = QueryScale(beta, length, offset=1, is_without_rope=True)
    chunk = raw["attention_chunk_size"]
    return DecoderTraits(
        is_rope_interleaved=True,
        rotates_before_norms=True,
        qk_norm=QkNorm.ROTATED_HEAD,
        query_scale=scale,
        attention_chunk=None if chunk is None else count(raw, "attention_chunk_size"),
        names=TensorNames(mlp="feed_forward", router="router", shared="shared_expert"),
    )


def _experts(raw: Mapping[str, Any], num_layers: int) -> Experts | None:
    layers = raw.get("moe_layers")
    if layers is None:
        step = count(raw, "interleave_moe_layer_step")
        layers = range(step - 1, num_layers, step)
    if not layers:
        return None
    found = read_experts(raw, "num_local_experts", layers, normalizes=False)
    return replace(
        found,
        routing=Routing(is_sigmoid=True),
        shared_size=found.intermediate_size,
        scales_inputs=True,
    )


LLAMA4: Mapping[str, Architecture] = {
    "Llama4ForCausalLM": Architecture(
        "llama4_text",
        ("Llama 4 Scout and Maverick (text)",),
        "attention to chunks on the layers with rotary embedding; queries and keys normalized "
        "after it; queries that grow with their position on the others; a mixture with a "
        "shared expert, whose weights multiply the inputs of experts",
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 500_000.0,
            "max_position_embeddings": 131_072,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16_384,
            "num_experts_per_tok": 1,
            "num_local_experts": 16,
            "interleave_moe_layer_step": 1,
            "use_qk_norm": True,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
        ropes=rope_on_some_layers,
        traits=_traits,
        experts=_experts,
        canonical=_canonical,
    ),
}
