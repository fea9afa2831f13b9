"""Keys of config.json with the only values that a family's layers have here; others are refused."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from specdec.config.json_values import unsupported

_Values = Mapping[str, tuple[Any, ...]]

_ALL: _Values = {
    "clip_qkv": (),
    "moe_layer_freq": (1,),
    "use_bidirectional_attention": (False,),
}
"""Values of the keys of every family for which FIXED has no others."""

_SIGMOID: _Values = {"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": ("noaux_tc",)}
"""Values of experts as in DeepSeek-V3; dots.llm1 has the method in place of the function."""

_HUNYUAN: _Values = {
    "mlp_bias": (False,),
    "norm_type": ("rms", "hf_rms"),
    "use_mla": (False,),
    "use_rotary_pos_emb": (True,),
}
_ERNIE: _Values = {"compression_ratio": (1.0,), "use_rmsnorm": (True,)}
_LFM2: _Values = {"block_use_swiglu": (True,), "use_pos_enc": (True,)}
_QWEN_HYBRID: _Values = {"attn_output_gate": (True,)}

FIXED: Mapping[str, _Values] = MappingProxyType(
    {
        "AfmoeForCausalLM": {
            "route_norm": (True,),
            "score_func": ("sigmoid",),
            **dict.fromkeys(("n_group", "num_expert_groups"), (1,)),
            **dict.fromkeys(("topk_group", "num_limited_groups"), (1,)),
        },
        "ApertusForCausalLM": {"qk_norm": (True,), "post_norm": (False,), "mlp_bias": (False,)},
        "DeepseekV2ForCausalLM": {"scoring_func": ("softmax",)},
        "DeepseekV3ForCausalLM": _SIGMOID,
        "DeepseekV32ForCausalLM": _SIGMOID,
        "Dots1ForCausalLM": _SIGMOID,
        "Ernie4_5ForCausalLM": _ERNIE,
        "Ernie4_5_MoeForCausalLM": {
            **_ERNIE,
            "moe_gate": ("topk",),
            "moe_gate_act": ("softmax",),
            "moe_norm_min": (1e-12,),
            "moe_use_aux_free": (True,),
        },
        "ExaoneMoeForCausalLM": _SIGMOID,
        "FalconH1ForCausalLM": {"attn_layer_indices": (), "mamba_use_mlp": (True,)},
        "Gemma3ForCausalLM": {"attn_logit_softcapping": ()},
        "Gemma4ForCausalLM": {"use_bidirectional_attention": (False, "vision")},
        "Glm4MoeForCausalLM": _SIGMOID,
        "Glm4MoeLiteForCausalLM": _SIGMOID,
        "GlmMoeDsaForCausalLM": _SIGMOID,
        "GraniteMoeHybridForCausalLM": {
            "normalization_function": ("rmsnorm",),
            "position_embedding_type": ("rope", "nope"),
        },
        "HunYuanDenseV1ForCausalLM": _HUNYUAN,
        "HunYuanMoEV1ForCausalLM": {
            **_HUNYUAN,
            "group_limited_greedy": (False,),
            "moe_layer_num_skipped": (0,),
            "routed_scaling_factor": (1, False),
            "use_mixed_mlp_moe": (True,),
        },
        "JambaForCausalLM": {"mamba_inner_layernorms": (True,), "sliding_window": ()},
        "KimiLinearForCausalLM": {
            "mla_use_nope": (True,),
            "moe_router_activation_func": ("sigmoid",),
        },
        "Lfm2ForCausalLM": _LFM2,
        "Lfm2MoeForCausalLM": _LFM2,
        "MiniMaxM2ForCausalLM": {
            "qk_norm_type": ("per_layer",),
            "scoring_func": ("sigmoid",),
            "shared_intermediate_size": (0,),
            "use_qk_norm": (True,),
            "use_routing_bias": (True,),
        },
        "NemotronHForCausalLM": {
            # transformers ignores the biases of attention.
            "attention_bias": (False,),
            "mamba_hidden_act": ("silu",),
            "mamba_proj_bias": (False,),
            "sliding_window": (),
        },
        "Qwen3NextForCausalLM": _QWEN_HYBRID,
        "Qwen3_5ForCausalLM": _QWEN_HYBRID,
        "Qwen3_5MoeForCausalLM": _QWEN_HYBRID,
        "SolarOpenForCausalLM": {**_SIGMOID, "use_qk_norm": (False,)},
    }
)
"""By architecture: keys, and their values; null and a missing key are among them."""


def fixed_keys(architecture: str) -> frozenset[str]:
    """Return the keys that `require_fixed` checks."""
    return frozenset((*_ALL, *FIXED.get(architecture, ())))


def require_fixed(architecture: str, raw: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for a value of config.json that the layers do not have."""
    for key, values in {**_ALL, **FIXED.get(architecture, {})}.items():
        if raw.get(key) not in (None, *values):
            names = (str(each).lower() if type(each) is bool else str(each) for each in values)
            raise unsupported(key, raw[key], " or ".join((*names, "null")))
