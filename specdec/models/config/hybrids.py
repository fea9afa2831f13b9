"""Registry of the supported architectures with recurrent layers, a part of `registry`."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

from specdec.config.json_values import count, positive, unsupported
from specdec.models.config.architecture import Architecture
from specdec.models.config.family_traits import (
    granite_traits,
    lfm2_moe_experts,
    mixtral_experts,
    qwen3_moe_experts,
)
from specdec.models.config.layer_patterns import LayerRopes, Windows, one_rope, partial_rope
from specdec.models.config.recurrent import (
    GatedDelta,
    Recurrent,
    RecurrentKind,
    ShortConvolution,
    StateSpace,
)
from specdec.models.config.rope import rotary_fraction
from specdec.models.config.traits import DecoderTraits, Experts, TensorNames

_FULL, _CONVOLUTION, _LINEAR = "full_attention", "conv", "linear_attention"

_PUBLISHED_TYPES = {"mamba": _LINEAR, "attention": _FULL}
"""Types of layers in published files of Granite 4, and those of transformers 5."""

_NO_LIMITS = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])
"""Limits of the steps of Mamba-2 that have no effect; the second as transformers 5 writes it."""

_MAX_KERNEL_SIZE = 64

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


def _with(raw: Mapping[str, Any], **values: Any) -> Mapping[str, Any]:
    """Return config.json with some values; of the other keys those that are read are read there."""
    return ChainMap(values, cast(MutableMapping[str, Any], raw))


def _lfm2_canonical(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of LFM2 under the names, and with the meaning, of other families."""
    size = count(raw, "block_ff_dim", count(raw, "intermediate_size"))
    if raw["block_auto_adjust_ff_dim"]:
        size = 2 * size // 3
        if raw["block_ffn_dim_multiplier"] is not None:
            multiple = count(raw, "block_multiple_of")
            size = int(positive(raw, "block_ffn_dim_multiplier") * size)
            size = -(-size // multiple) * multiple
    return _with(_lfm2_moe_canonical(raw), intermediate_size=size)


def _lfm2_moe_canonical(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of LFM2 with experts under the names of other families."""
    return _with(raw, tie_word_embeddings=raw.get("tie_embedding", raw["tie_word_embeddings"]))


def _lfm2_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    del raw
    names = TensorNames(
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
    return DecoderTraits(names=names)


def _lfm2_recurrent(raw: Mapping[str, Any], num_layers: int) -> Recurrent | None:
    attending = raw.get("full_attn_idxs")
    default = [
        _FULL if attending is None or index in attending else _CONVOLUTION
        for index in range(num_layers)
    ]
    types = raw.get("layer_types") or default
    if types == [_FULL] * num_layers:
        return None
    kind = ShortConvolution(
        count(raw, "hidden_size"), count(raw, "conv_L_cache"), bool(raw.get("conv_bias"))
    )
    _require_window("conv_L_cache", kind.kernel_size)
    return _recurrent_layers(types, num_layers, _CONVOLUTION, kind)


def _qwen3_5_canonical(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of Qwen 3.5 without the parts of its rotation that are equal in a text.

    Multimodal rotation takes the frequencies of a head from three positions of a token.
    """
    given = raw.get("rope_parameters")
    if not isinstance(given, dict):
        return raw
    kept = {key: value for key, value in given.items() if not key.startswith("mrope_")}
    return _with(raw, rope_parameters=kept)


def _qwen3_5_moe_canonical(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of Qwen 3.5 with experts, which has no layer without them."""
    return _with(
        _qwen3_5_canonical(raw),
        intermediate_size=raw["moe_intermediate_size"],
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
    )


def _qwen3_next_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    del raw
    names = TensorNames(shared="shared_expert")
    return DecoderTraits(adds_one_to_norms=True, has_attention_gate=True, names=names)


def _qwen3_next_experts(raw: Mapping[str, Any], num_layers: int) -> Experts | None:
    found = qwen3_moe_experts(raw, num_layers)
    if found is None or not found.layers:
        return None
    size = count(raw, "shared_expert_intermediate_size")
    return replace(found, shared_size=size, has_shared_gate=True)


def _delta(*, is_grouped: bool) -> RecurrentRule:
    """Return the rule for Gated DeltaNet. is_grouped: as in GatedDelta."""

    def recurrent(raw: Mapping[str, Any], num_layers: int) -> Recurrent:
        kind = GatedDelta(
            count(raw, "linear_num_key_heads"),
            count(raw, "linear_num_value_heads"),
            count(raw, "linear_key_head_dim"),
            count(raw, "linear_value_head_dim"),
            count(raw, "linear_conv_kernel_dim"),
            is_grouped,
        )
        _require_window("linear_conv_kernel_dim", kind.kernel_size)
        if kind.num_value_heads % kind.num_key_heads:
            limit = f"a multiple of linear_num_key_heads ({kind.num_key_heads})"
            raise unsupported("linear_num_value_heads", kind.num_value_heads, limit)
        types = raw.get("layer_types")
        if types is None:
            every = count(raw, "full_attention_interval")
            types = [_LINEAR if (index + 1) % every else _FULL for index in range(num_layers)]
        return _recurrent_layers(types, num_layers, _LINEAR, kind)

    return recurrent


def _granite_hybrid_canonical(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of Granite 4 under the names of other families."""
    if raw.get("time_step_limit") not in (None, *_NO_LIMITS):
        raise unsupported("time_step_limit", raw["time_step_limit"], "left out, or [0.0, Infinity]")
    if raw["num_local_experts"]:
        return raw
    return _with(raw, intermediate_size=raw["shared_intermediate_size"])


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


def _state_space(raw: Mapping[str, Any], num_layers: int) -> Recurrent:
    values, heads = (
        count(raw, "mamba_expand") * count(raw, "hidden_size"),
        count(raw, "mamba_n_heads"),
    )
    given = raw["mamba_d_head"]
    head_dim = values // heads if given == "auto" else count(raw, "mamba_d_head")
    if head_dim * heads != values:
        raise unsupported("mamba_d_head", given, f"auto, or {values} / mamba_n_heads ({heads})")
    kind = StateSpace(
        heads,
        head_dim,
        count(raw, "mamba_n_groups"),
        count(raw, "mamba_d_state"),
        count(raw, "mamba_d_conv"),
        bool(raw["mamba_proj_bias"]),
        bool(raw["mamba_conv_bias"]),
    )
    _require_window("mamba_d_conv", kind.kernel_size)
    if heads % kind.num_groups:
        limit = f"a divisor of mamba_n_heads ({heads})"
        raise unsupported("mamba_n_groups", kind.num_groups, limit)
    types = raw.get("layer_types") or raw.get("layers_block_type")
    if isinstance(types, list):
        types = [_PUBLISHED_TYPES.get(each, each) for each in types]
    return _recurrent_layers(types, num_layers, _LINEAR, kind)


def _require_window(name: str, kernel_size: int) -> None:
    if not 2 <= kernel_size <= _MAX_KERNEL_SIZE:
        raise unsupported(name, kernel_size, f"from 2 to {_MAX_KERNEL_SIZE}")


def _recurrent_layers(types: object, num_layers: int, name: str, kind: RecurrentKind) -> Recurrent:
    """Return the layers whose type has `name`.

    Raises UnsupportedModelError unless these and full attention are the types that occur.
    """
    if not isinstance(types, list) or len(types) != num_layers or {*types} != {_FULL, name}:
        raise unsupported("layer_types", types, f"{num_layers} times {name} or {_FULL}, and both")
    return Recurrent(frozenset(index for index, each in enumerate(types) if each == name), kind)


HYBRIDS: Mapping[str, Architecture] = MappingProxyType(
    {
        "Lfm2ForCausalLM": Architecture(
            "lfm2",
            ("LFM2 350M, 700M, 1.2B, 2.6B",),
            "short convolutions in place of attention on most layers; queries and keys normalized "
            "by head",
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
            traits=_lfm2_traits,
            recurrent=_lfm2_recurrent,
            canonical=_lfm2_canonical,
        ),
        "Lfm2MoeForCausalLM": Architecture(
            "lfm2_moe",
            ("LFM2 8B-A1B",),
            "as LFM2, with a mixture of experts, chosen by sigmoids and a bias, after the first "
            "layers",
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
            traits=_lfm2_traits,
            experts=lfm2_moe_experts,
            recurrent=_lfm2_recurrent,
            canonical=_lfm2_moe_canonical,
        ),
        "Qwen3NextForCausalLM": Architecture(
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
            output_bias="attention_bias",
            qk_norm=True,
            ropes=partial_rope,
            rotary_fraction=rotary_fraction,
            traits=_qwen3_next_traits,
            experts=_qwen3_next_experts,
            recurrent=_delta(is_grouped=True),
        ),
        "Qwen3_5ForCausalLM": Architecture(
            "qwen3_5_text",
            ("Qwen 3.5 dense (text)",),
            "as Qwen3-Next, without a mixture",
            {**_DELTA_DEFAULTS, "intermediate_size": 12288, "num_key_value_heads": 4},
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            qk_norm=True,
            ropes=partial_rope,
            rotary_fraction=rotary_fraction,
            traits=_qwen3_next_traits,
            recurrent=_delta(is_grouped=False),
            canonical=_qwen3_5_canonical,
        ),
        "Qwen3_5MoeForCausalLM": Architecture(
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
            output_bias="attention_bias",
            qk_norm=True,
            ropes=partial_rope,
            rotary_fraction=rotary_fraction,
            traits=_qwen3_next_traits,
            experts=_qwen3_next_experts,
            recurrent=_delta(is_grouped=False),
            canonical=_qwen3_5_moe_canonical,
        ),
        "GraniteMoeHybridForCausalLM": Architecture(
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
            output_bias="attention_bias",
            ropes=_granite_hybrid_ropes,
            traits=_granite_hybrid_traits,
            experts=_granite_hybrid_experts,
            recurrent=_state_space,
            canonical=_granite_hybrid_canonical,
        ),
    }
)
