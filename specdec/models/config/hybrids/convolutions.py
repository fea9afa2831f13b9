"""Families with short convolutions in place of attention: LFM2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.config.json_values import count, overlaid, positive, unsupported
from specdec.models.config.architecture import Architecture
from specdec.models.config.families.family_traits import lfm2_moe_experts
from specdec.models.config.hybrids.layer_types import (
    CONVOLUTION,
    FULL,
    recurrent_layers,
    require_window,
)
from specdec.models.config.recurrent import Recurrent, ShortConvolution
from specdec.models.config.traits import DecoderTraits, TensorNames

_TRAITS = DecoderTraits(
    names=TensorNames(
        input_norm="operator_norm",
        mlp_norm="ffn_norm",
        final_norm="model.embedding_norm",
        attention_output="out_proj",
        qk_norms=("q_layernorm", "k_layernorm"),
        choice_bias="expert_bias",
        mlp="feed_forward",
        gate_up=("w1", "w3"),
        down="w2",
    )
)


def _lfm2_canonical(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of LFM2 under the names, and with the meaning, of other families."""
    size = count(raw, "block_ff_dim", count(raw, "intermediate_size"))
    if raw["block_auto_adjust_ff_dim"]:
        size = 2 * size // 3
        if raw["block_ffn_dim_multiplier"] is not None:
            multiple = count(raw, "block_multiple_of")
            size = int(positive(raw, "block_ffn_dim_multiplier") * size)
            size = -(-size // multiple) * multiple
    return overlaid(_lfm2_moe_canonical(raw), intermediate_size=size)


def _lfm2_moe_canonical(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of LFM2 with experts under the names of other families.

    Raises UnsupportedModelError for convolutions of another width than hidden states.
    """
    hidden = count(raw, "hidden_size")
    for name in ("block_dim", "conv_dim", "conv_dim_out"):
        if raw.get(name) not in (None, hidden):
            raise unsupported(name, raw[name], f"hidden_size ({hidden})")
    return overlaid(raw, tie_word_embeddings=raw.get("tie_embedding", raw["tie_word_embeddings"]))


def _lfm2_recurrent(raw: Mapping[str, Any], num_layers: int) -> Recurrent | None:
    attending = raw.get("full_attn_idxs")
    default = [
        FULL if attending is None or index in attending else CONVOLUTION
        for index in range(num_layers)
    ]
    types = raw.get("layer_types") or default
    if types == [FULL] * num_layers:
        return None
    kind = ShortConvolution(
        count(raw, "hidden_size"), count(raw, "conv_L_cache"), bool(raw.get("conv_bias"))
    )
    require_window("conv_L_cache", kind.kernel_size)
    return recurrent_layers(types, num_layers, CONVOLUTION, kind)


LFM2 = Architecture(
    "lfm2",
    ("LFM2 350M, 700M, 1.2B, 2.6B",),
    "short convolutions in place of attention on most layers; queries and keys normalized by head",
    {
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
        "max_position_embeddings": 128_000,
        "norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "conv_L_cache": 3,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "tie_word_embeddings": True,
    },
    norm_eps_key="norm_eps",
    qk_norm=True,
    traits=_TRAITS,
    recurrent=_lfm2_recurrent,
    canonical=_lfm2_canonical,
)

LFM2_MOE = Architecture(
    "lfm2_moe",
    ("LFM2 8B-A1B",),
    "as LFM2, with a mixture of experts, chosen by sigmoids and a bias, after the first layers",
    {
        "num_key_value_heads": 8,
        "max_position_embeddings": 128_000,
        "norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "conv_L_cache": 3,
        "tie_word_embeddings": True,
        "num_dense_layers": 2,
        "moe_intermediate_size": 1792,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    },
    norm_eps_key="norm_eps",
    qk_norm=True,
    traits=_TRAITS,
    experts=lfm2_moe_experts,
    recurrent=_lfm2_recurrent,
    canonical=_lfm2_moe_canonical,
)
