"""Families with the state space of Mamba-2 in place of attention, or beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from specdec.config.json_values import count, head_dim_of, overlaid, positive, unsupported
from specdec.models.config.architecture import Architecture
from specdec.models.config.families.family_traits import granite_traits, mixtral_experts
from specdec.models.config.hybrids.layer_types import (
    FULL,
    LINEAR,
    PUBLISHED_TYPES,
    recurrent_layers,
    require_window,
)
from specdec.models.config.layer_patterns import LayerRopes, Windows, one_rope
from specdec.models.config.recurrent import Recurrent, StateSpace
from specdec.models.config.rope import rotary_fraction
from specdec.models.config.traits import (
    BesideAttention,
    DecoderTraits,
    Experts,
    LogitTransform,
    TensorNames,
)

_BAMBA_NAMES = TensorNames(
    mlp="feed_forward", mlp_norm="pre_ff_layernorm", final_norm="model.final_layernorm"
)

_NO_LIMITS = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])
"""Limits of the steps of Mamba-2 that have no effect; the second as transformers 5 writes it."""


class StateSpaceKeys(NamedTuple):
    """The keys of config.json for the sizes and biases of Mamba-2."""

    num_heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    num_groups: str = "mamba_n_groups"
    state_dim: str = "mamba_d_state"
    kernel_size: str = "mamba_d_conv"
    bias: str = "mamba_proj_bias"
    conv_bias: str = "mamba_conv_bias"


_KEYS = StateSpaceKeys()


def state_space(
    raw: Mapping[str, Any], num_values: int | None = None, keys: StateSpaceKeys = _KEYS
) -> StateSpace:
    """Return the sizes of Mamba-2. num_values: of all heads; None for any number."""
    if raw.get("time_step_limit") not in (None, *_NO_LIMITS):
        raise unsupported("time_step_limit", raw["time_step_limit"], "left out, or [0.0, Infinity]")
    heads, given = count(raw, keys.num_heads), raw[keys.head_dim]
    is_auto = given == "auto" and num_values is not None
    head_dim = (num_values or 0) // heads if is_auto else count(raw, keys.head_dim)
    if num_values not in (None, head_dim * heads):
        limit = f"auto, or {num_values} / {keys.num_heads} ({heads})"
        raise unsupported(keys.head_dim, given, limit)
    groups = count(raw, keys.num_groups)
    if heads % groups:
        limit = f"a divisor of {keys.num_heads} ({heads})"
        raise unsupported(keys.num_groups, groups, limit)
    kernel_size, has_bias = count(raw, keys.kernel_size), bool(raw.get(keys.bias))
    require_window(keys.kernel_size, kernel_size)
    state_dim, has_conv_bias = count(raw, keys.state_dim), bool(raw[keys.conv_bias])
    return StateSpace(
        heads, head_dim, groups, state_dim, kernel_size, has_bias, has_conv_bias, has_bias
    )


def _granite_hybrid_canonical(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of Granite 4 under the names of other families."""
    if raw["num_local_experts"]:
        return raw
    return overlaid(raw, intermediate_size=count(raw, "shared_intermediate_size"))


def _granite_hybrid_experts(raw: Mapping[str, Any], num_layers: int) -> Experts | None:
    if not raw["num_local_experts"]:
        return None
    shared_size = count(raw, "shared_intermediate_size")
    return replace(mixtral_experts(raw, num_layers), shared_size=shared_size)


def _granite_hybrid_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    names = TensorNames(
        gate_up=("input_linear",),
        down="output_linear",
        mlp="shared_mlp",
        mixture="",
        experts="block_sparse_moe.experts",
        expert_gate_up=("gate_proj", "up_proj"),
        expert_down="down_proj",
        router="block_sparse_moe.router",
        shared="shared_mlp",
    )
    return replace(granite_traits(raw), names=names)


def _granite_hybrid_ropes(raw: Mapping[str, Any], windows: Windows) -> LayerRopes:
    has_rope = raw.get("position_embedding_type") == "rope"
    return one_rope(raw, windows) if has_rope else (None,) * len(windows)


def _granite_hybrid_recurrent(raw: Mapping[str, Any], num_layers: int) -> Recurrent:
    kind = state_space(raw, count(raw, "mamba_expand") * count(raw, "hidden_size"))
    types = raw.get("layer_types") or raw.get("layers_block_type")
    if isinstance(types, list):
        types = [PUBLISHED_TYPES.get(each, each) for each in types]
    return recurrent_layers(types, num_layers, LINEAR, kind)


def _bamba_canonical(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of Bamba. Raises UnsupportedModelError for another rotation than its half."""
    dim = head_dim_of(raw, count(raw, "hidden_size"), count(raw, "num_attention_heads"))
    rotated = raw.get("attn_rotary_emb")
    if rotated not in (None, dim // 2):
        raise unsupported("attn_rotary_emb", rotated, f"{dim // 2}, half of a head")
    return raw


def _bamba_recurrent(raw: Mapping[str, Any], num_layers: int) -> Recurrent:
    kind = state_space(raw, count(raw, "mamba_expand") * count(raw, "hidden_size"))
    attending = raw.get("attn_layer_indices") or []
    types = [FULL if index in attending else LINEAR for index in range(num_layers)]
    return recurrent_layers(types, num_layers, LINEAR, kind)


def _falcon_h1_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    head_dim = head_dim_of(raw, count(raw, "hidden_size"), count(raw, "num_attention_heads"))
    gate_scale, mlp_scale = _factors(raw, "mlp_multipliers", 2)
    return DecoderTraits(
        attention_scale=positive(raw, "key_multiplier") * head_dim**-0.5,
        embedding_scale=positive(raw, "embedding_multiplier"),
        gate_scale=gate_scale,
        mlp_scale=mlp_scale,
        logits=LogitTransform(scale=positive(raw, "lm_head_multiplier")),
        names=_BAMBA_NAMES,
    )


def _falcon_h1_recurrent(raw: Mapping[str, Any], num_layers: int) -> Recurrent:
    expanded = count(raw, "mamba_expand") * count(raw, "hidden_size")
    kind = state_space(raw, count(raw, "mamba_d_ssm", expanded))
    gates, values, keys, queries, steps = _factors(raw, "ssm_multipliers", 5)
    kind = replace(
        kind,
        has_output_bias=bool(raw["projectors_bias"]),
        has_norm=bool(raw["mamba_rms_norm"]),
        norms_before_gate=bool(raw["mamba_norm_before_gate"]),
        input_scale=positive(raw, "ssm_in_multiplier"),
        scales=(gates, values, keys, queries, steps),
    )
    beside = BesideAttention(
        positive(raw, "attention_in_multiplier"),
        positive(raw, "attention_out_multiplier"),
        positive(raw, "ssm_out_multiplier"),
    )
    return Recurrent(frozenset(range(num_layers)), kind, beside)


def _factors(raw: Mapping[str, Any], name: str, size: int) -> list[float]:
    """Return a list of factors above 0, by default all 1."""
    given = raw.get(name)
    if given is None:
        return [1.0] * size
    if not isinstance(given, list) or len(given) != size:
        raise unsupported(name, given, f"a list of {size} numbers")
    return [positive({name: each}, name) for each in given]


GRANITE_HYBRID = Architecture(
    "granitemoehybrid",
    ("Granite 4.0 H 350M, 1B, Tiny, Small",),
    "Mamba-2 in place of attention on most layers; scaled embeddings, scores, residual "
    "stream and logits; a mixture with a shared expert, or none",
    {
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        **{f"{name}_multiplier": 1.0 for name in ("attention", "embedding", "residual")},
        "logits_scaling": 1.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_head": "auto",
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    },
    qkv_bias="attention_bias",
    ropes=_granite_hybrid_ropes,
    traits=_granite_hybrid_traits,
    experts=_granite_hybrid_experts,
    recurrent=_granite_hybrid_recurrent,
    canonical=_granite_hybrid_canonical,
)

_MAMBA_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}

BAMBA = Architecture(
    "bamba",
    ("Bamba 9B",),
    "Mamba-2 in place of attention on most layers; rotation of half of each head",
    {**_MAMBA_DEFAULTS, "max_position_embeddings": 262_144, "partial_rotary_factor": 0.5},
    qkv_bias="attention_bias",
    mlp_bias="mlp_bias",
    rotary_fraction=rotary_fraction,
    traits=DecoderTraits(names=_BAMBA_NAMES),
    recurrent=_bamba_recurrent,
    canonical=_bamba_canonical,
)

FALCON_H1 = Architecture(
    "falcon_h1",
    ("Falcon-H1 0.5B to 34B",),
    "Mamba-2 beside attention on each layer; factors of embeddings, keys, inputs and outputs of "
    "both, of the MLP and of logits",
    {
        **_MAMBA_DEFAULTS,
        "max_position_embeddings": 8192,
        "mamba_d_ssm": 1024,
        "mamba_norm_before_gate": True,
        "mamba_rms_norm": False,
        "projectors_bias": False,
        **{f"{name}_multiplier": 1.0 for name in ("embedding", "key", "lm_head")},
        **{f"{name}_multiplier": 1.0 for name in ("attention_in", "attention_out")},
        **{f"{name}_multiplier": 1.0 for name in ("ssm_in", "ssm_out")},
    },
    qkv_bias="attention_bias",
    mlp_bias="mlp_bias",
    traits=_falcon_h1_traits,
    recurrent=_falcon_h1_recurrent,
)
