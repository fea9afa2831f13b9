"""Hunyuan of the first version, dense and with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specdec.config.json_values import count, head_dim_of, overlaid, positive, unsupported
from specdec.models.config.architecture import Architecture
from specdec.models.config.families.family_traits import read_experts
from specdec.models.config.traits import DecoderTraits, Experts, TensorNames

_NORMS = ("query_layernorm", "key_layernorm")


def _canonical(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys without `alpha`, which multiplies theta by alpha^(d / (d - 2)).

    d: dimensions of a head (NTK-aware interpolation, for contexts of any length).
    """
    if raw.get("use_cla"):
        raise unsupported("use_cla", raw["use_cla"], "false")
    raw = overlaid(raw, head_dim=raw.get("head_dim") or raw.get("attention_head_dim"))
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    rope = raw.get(name)
    if not isinstance(rope, dict) or not rope.get("alpha"):
        return raw
    kind = rope.get("rope_type", rope.get("type"))
    if kind != "dynamic":
        raise unsupported("rope_type", kind, "dynamic, where alpha is given")
    dim = head_dim_of(raw, count(raw, "hidden_size"), count(raw, "num_attention_heads"))
    given = rope if rope.get("rope_theta") else raw
    theta = positive(given, "rope_theta") * positive(rope, "alpha") ** (dim / (dim - 2))
    plain = {"rope_type": "default", "rope_theta": theta}
    return overlaid(raw, **{name: None, "rope_parameters": plain})


def _experts(raw: Mapping[str, Any], num_layers: int) -> Experts:
    size = count(raw, "intermediate_size")
    for name, only in (("num_shared_expert", 1), ("moe_intermediate_size", size)):
        if raw.get(name) is not None and _of_all_layers(raw, name) != only:
            raise unsupported(name, raw[name], str(only))
    raw = overlaid(raw, moe_topk=_of_all_layers(raw, "moe_topk"))
    found = read_experts(
        raw,
        "num_experts",
        range(num_layers),
        per_token_key="moe_topk",
        size_key="intermediate_size",
    )
    return replace(found, shared_size=size)


def _of_all_layers(raw: Mapping[str, Any], name: str) -> int:
    """Return a number that all layers share, which may be a list of one for each layer."""
    given = raw[name]
    if isinstance(given, list):
        if not given or given != [given[0]] * len(given):
            raise unsupported(name, given, "the same number for all layers")
        given = given[0]
    return count({name: given}, name)


_DEFAULTS = {"rope_theta": 10_000.0, "use_qk_norm": True}

HUNYUAN: Mapping[str, Architecture] = {
    "HunYuanDenseV1ForCausalLM": Architecture(
        "hunyuan_v1_dense",
        ("Hunyuan 0.5B, 1.8B, 4B and 7B",),
        "queries and keys normalized by head, after their rotation; theta scaled by `alpha`",
        _DEFAULTS,
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
        traits=DecoderTraits(rotates_before_norms=True, names=TensorNames(qk_norms=_NORMS)),
        canonical=_canonical,
    ),
    "HunYuanMoEV1ForCausalLM": Architecture(
        "hunyuan_v1_moe",
        ("Hunyuan A13B",),
        "as Hunyuan dense, with a mixture and a shared expert on each layer",
        {**_DEFAULTS, "num_experts": 1, "moe_topk": 1},
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
        traits=DecoderTraits(
            rotates_before_norms=True,
            names=TensorNames(qk_norms=_NORMS, router="gate.wg", shared="shared_mlp"),
        ),
        experts=_experts,
        canonical=_canonical,
    ),
}
