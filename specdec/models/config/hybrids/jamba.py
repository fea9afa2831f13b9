"""Jamba: Mamba in place of attention on most layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specdec.config.json_values import count, overlaid, unsupported
from specdec.models.config.architecture import Architecture
from specdec.models.config.families.family_traits import mixtral_experts
from specdec.models.config.hybrids.layer_types import (
    FULL,
    LINEAR,
    recurrent_layers,
    require_window,
)
from specdec.models.config.layer_patterns import no_ropes
from specdec.models.config.recurrent import Recurrent, SelectiveScan
from specdec.models.config.traits import DecoderTraits, Experts, TensorNames


def _experts(raw: Mapping[str, Any], num_layers: int) -> Experts | None:
    if raw["num_experts"] == 1:
        return None
    layers = _periodic(raw, "expert_layer", num_layers)
    found = mixtral_experts(overlaid(raw, num_local_experts=raw["num_experts"]), num_layers)
    return replace(found, layers=layers, normalizes=False)


def _recurrent(raw: Mapping[str, Any], num_layers: int) -> Recurrent:
    rank, hidden = raw["mamba_dt_rank"], count(raw, "hidden_size")
    kind = SelectiveScan(
        hidden,
        count(raw, "mamba_expand") * hidden,
        count(raw, "mamba_d_state"),
        -(-hidden // 16) if rank == "auto" else count(raw, "mamba_dt_rank"),
        count(raw, "mamba_d_conv"),
        bool(raw["mamba_proj_bias"]),
        bool(raw["mamba_conv_bias"]),
    )
    require_window("mamba_d_conv", kind.kernel_size)
    attending = _periodic(raw, "attn_layer", num_layers)
    types = [FULL if index in attending else LINEAR for index in range(num_layers)]
    return recurrent_layers(types, num_layers, LINEAR, kind)


def _periodic(raw: Mapping[str, Any], name: str, num_layers: int) -> frozenset[int]:
    """Return one layer of each period."""
    period, offset = count(raw, f"{name}_period"), raw[f"{name}_offset"]
    if type(offset) is not int or not 0 <= offset < period:
        raise unsupported(f"{name}_offset", offset, f"from 0 to {name}_period - 1 ({period - 1})")
    return frozenset(range(offset, num_layers, period))


JAMBA = Architecture(
    "jamba",
    ("Jamba 1.5 Mini, Large", "Jamba 1.6, 1.7", "Jamba Reasoning 3B"),
    "Mamba in place of attention on seven of eight layers; no rotation; a mixture of experts on "
    "every second layer, or none",
    {
        "num_key_value_heads": 8,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-6,
        "num_experts_per_tok": 2,
        "num_experts": 16,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": "auto",
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    },
    ropes=no_ropes,
    traits=DecoderTraits(
        names=TensorNames(
            mlp="feed_forward",
            mlp_norm="pre_ff_layernorm",
            final_norm="model.final_layernorm",
            router="router",
        )
    ),
    experts=_experts,
    recurrent=_recurrent,
)
