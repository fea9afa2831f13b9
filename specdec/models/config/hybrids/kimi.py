"""Kimi Linear: Kimi Delta Attention in place of latent attention on most layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specdec.config.json_values import count, overlaid
from specdec.models.config.architecture import Architecture
from specdec.models.config.families.family_traits import deepseek_latent, deepseek_traits
from specdec.models.config.families.sigmoid_mixtures import experts_by_type
from specdec.models.config.hybrids.layer_types import (
    FULL,
    LINEAR,
    recurrent_layers,
    require_window,
)
from specdec.models.config.layer_patterns import no_ropes
from specdec.models.config.recurrent import KimiDelta, Recurrent
from specdec.models.config.traits import DecoderTraits, TensorNames

_NAMES = {
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
    "model_max_length": "max_position_embeddings",
}
"""Keys of Kimi Linear, and those of DeepSeek-V3 for the same values."""

_OF_RECURRENCE = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""Keys of `linear_attn_config`, which published files have, and those of transformers 5."""


def _canonical(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of Kimi Linear under the names of other families."""
    own = raw.get("linear_attn_config") or {}
    renamed = {other: raw[name] for name, other in _NAMES.items() if name in raw}
    nested = {other: own[name] for name, other in _OF_RECURRENCE.items() if name in own}
    types = raw.get("layer_types") or _published_types(own, count(raw, "num_hidden_layers"))
    without_rope = {"rope_interleave": False, "rope_scaling": None, "rope_parameters": None}
    return overlaid(raw, **renamed, **nested, **without_rope, layer_types=types)


def _published_types(own: Mapping[str, Any], num_layers: int) -> list[str]:
    """Return the types of layers, whose numbers begin at 1 in published files."""
    attending = own.get("full_attn_layers")
    if attending is None:
        attending = [index + 1 for index in range(num_layers) if index and index % 4 == 0]
    return [FULL if index + 1 in attending else LINEAR for index in range(num_layers)]


def _traits(raw: Mapping[str, Any]) -> DecoderTraits:
    names = TensorNames(mixture="block_sparse_moe", expert_gate_up=("w1", "w3"), expert_down="w2")
    return replace(deepseek_traits(raw), names=names)


def _recurrent(raw: Mapping[str, Any], num_layers: int) -> Recurrent:
    kind = KimiDelta(
        count(raw, "linear_num_heads"),
        count(raw, "linear_head_dim"),
        count(raw, "linear_conv_kernel_dim"),
    )
    require_window("linear_conv_kernel_dim", kind.kernel_size)
    return recurrent_layers(raw["layer_types"], num_layers, LINEAR, kind)


KIMI_LINEAR = Architecture(
    "kimi_linear",
    ("Kimi Linear 48B-A3B",),
    "Kimi Delta Attention in place of latent attention on three of four layers; no rotation; "
    "experts as in DeepSeek-V3",
    {
        "max_position_embeddings": 1_048_576,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
        "first_k_dense_replace": 1,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": True,
        "moe_intermediate_size": 1024,
        "routed_scaling_factor": 2.446,
    },
    ropes=no_ropes,
    latent=deepseek_latent,
    traits=_traits,
    experts=experts_by_type,
    recurrent=_recurrent,
    canonical=_canonical,
)
