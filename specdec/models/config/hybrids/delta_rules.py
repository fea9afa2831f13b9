"""Families with the gated delta rule in place of attention: Qwen3-Next, Qwen 3.5, OLMo Hybrid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from specdec.config.json_values import count, overlaid, unsupported
from specdec.models.config.architecture import Architecture
from specdec.models.config.families.family_traits import OLMO2, gated_shared_experts
from specdec.models.config.hybrids.layer_types import (
    FULL,
    LINEAR,
    recurrent_layers,
    require_window,
)
from specdec.models.config.layer_patterns import LayerRopes, Windows, one_rope
from specdec.models.config.recurrent import GatedDelta, Recurrent
from specdec.models.config.rope import rotary_fraction
from specdec.models.config.traits import LLAMA, DecoderTraits, TensorNames

_OLMO_NORM_EPS = 1e-5
"""Epsilon of the norm of a recurrent layer's outputs, whatever config.json has for other norms."""

RecurrentRule = Callable[[Mapping[str, Any], int], Recurrent]

_DELTA_DEFAULTS = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}

_QWEN3_NEXT_TRAITS = DecoderTraits(
    adds_one_to_norms=True, has_attention_gate=True, names=TensorNames(shared="shared_expert")
)


def _qwen3_5_canonical(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of Qwen 3.5 without the parts of its rotation that are equal in a text.

    Multimodal rotation takes the frequencies of a head from three positions of a token.
    """
    given = raw.get("rope_parameters")
    if not isinstance(given, dict):
        return raw
    kept = {key: value for key, value in given.items() if not key.startswith("mrope_")}
    return overlaid(raw, rope_parameters=kept)


def _qwen3_5_moe_canonical(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of Qwen 3.5 with experts, which has no layer without them."""
    return overlaid(
        _qwen3_5_canonical(raw),
        intermediate_size=count(raw, "moe_intermediate_size"),
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
    )


def _delta(*, is_grouped: bool) -> RecurrentRule:
    """Return the rule for Gated DeltaNet. is_grouped: as in GatedDelta."""

    def recurrent(raw: Mapping[str, Any], num_layers: int) -> Recurrent:
        kind = _gated_delta(raw, is_grouped=is_grouped)
        types = raw.get("layer_types")
        if types is None:
            every = count(raw, "full_attention_interval")
            types = [LINEAR if (index + 1) % every else FULL for index in range(num_layers)]
        return recurrent_layers(types, num_layers, LINEAR, kind)

    return recurrent


def _gated_delta(raw: Mapping[str, Any], *, is_grouped: bool) -> GatedDelta:
    kind = GatedDelta(
        count(raw, "linear_num_key_heads"),
        count(raw, "linear_num_value_heads"),
        count(raw, "linear_key_head_dim"),
        count(raw, "linear_value_head_dim"),
        count(raw, "linear_conv_kernel_dim"),
        is_grouped,
    )
    require_window("linear_conv_kernel_dim", kind.kernel_size)
    if kind.num_value_heads % kind.num_key_heads:
        limit = f"a multiple of linear_num_key_heads ({kind.num_key_heads})"
        raise unsupported("linear_num_value_heads", kind.num_value_heads, limit)
    return kind


def _olmo_hybrid_canonical(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of OLMo Hybrid with the sizes that follow from others."""
    heads, hidden = count(raw, "num_attention_heads"), count(raw, "hidden_size")
    num_keys = count(raw, "linear_num_key_heads", heads)
    key_dim = count(raw, "linear_key_head_dim", 3 * hidden // (4 * num_keys))
    return overlaid(
        raw,
        linear_num_key_heads=num_keys,
        linear_num_value_heads=count(raw, "linear_num_value_heads", heads),
        linear_key_head_dim=key_dim,
        linear_value_head_dim=count(raw, "linear_value_head_dim", 2 * key_dim),
    )


def _olmo_hybrid_ropes(raw: Mapping[str, Any], windows: Windows) -> LayerRopes:
    given = raw.get("rope_parameters") or {}
    has_rope = not isinstance(given, dict) or given.get("rope_theta", 0) is not None
    return one_rope(raw, windows) if has_rope else (None,) * len(windows)


def _olmo_hybrid_recurrent(raw: Mapping[str, Any], num_layers: int) -> Recurrent:
    kind = replace(
        _gated_delta(raw, is_grouped=False),
        is_separate=True,
        share_scale=2.0 if raw["linear_allow_neg_eigval"] else 1.0,
        norm_eps=_OLMO_NORM_EPS,
    )
    types = raw.get("layer_types")
    if types is None:
        types = [LINEAR if (index + 1) % 4 else FULL for index in range(num_layers)]
        types[-1] = FULL if num_layers < 4 else types[-1]
    return replace(recurrent_layers(types, num_layers, LINEAR, kind), traits=LLAMA)


QWEN3_NEXT = Architecture(
    "qwen3_next",
    ("Qwen3-Next 80B-A3B", "Qwen3-Coder-Next"),
    "Gated DeltaNet in place of attention on three of four layers; gated attention; a "
    "mixture with a gated shared expert",
    {
        **_DELTA_DEFAULTS,
        "intermediate_size": 5632,
        "num_key_value_heads": 2,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10,
        "num_experts": 512,
        "norm_topk_prob": True,
    },
    qkv_bias="attention_bias",
    qk_norm=True,
    rotary_fraction=rotary_fraction,
    traits=_QWEN3_NEXT_TRAITS,
    experts=gated_shared_experts,
    recurrent=_delta(is_grouped=True),
)

QWEN3_5 = Architecture(
    "qwen3_5_text",
    ("Qwen 3.5 dense (text)",),
    "as Qwen3-Next, without a mixture",
    {**_DELTA_DEFAULTS, "intermediate_size": 12288, "num_key_value_heads": 4},
    qkv_bias="attention_bias",
    qk_norm=True,
    rotary_fraction=rotary_fraction,
    traits=_QWEN3_NEXT_TRAITS,
    recurrent=_delta(is_grouped=False),
    canonical=_qwen3_5_canonical,
)

QWEN3_5_MOE = Architecture(
    "qwen3_5_moe_text",
    ("Qwen 3.5 35B-A3B, 122B-A10B, 397B-A17B (text)",),
    "as Qwen3-Next; the experts of a layer in one tensor",
    {
        **_DELTA_DEFAULTS,
        "intermediate_size": None,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
    },
    qkv_bias="attention_bias",
    qk_norm=True,
    rotary_fraction=rotary_fraction,
    traits=_QWEN3_NEXT_TRAITS,
    experts=gated_shared_experts,
    recurrent=_delta(is_grouped=False),
    canonical=_qwen3_5_moe_canonical,
)

OLMO_HYBRID = Architecture(
    "olmo_hybrid",
    ("OLMo Hybrid 7B",),
    "Gated DeltaNet in place of attention on three of four layers, with norms before it and the "
    "MLP; the others as OLMo 2, without rotation where `rope_theta` is null",
    {
        "intermediate_size": 11008,
        "max_position_embeddings": 65_536,
        "rms_norm_eps": 1e-6,
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
    },
    qkv_bias="attention_bias",
    qk_norm=True,
    ropes=_olmo_hybrid_ropes,
    traits=OLMO2,
    recurrent=_olmo_hybrid_recurrent,
    canonical=_olmo_hybrid_canonical,
)
