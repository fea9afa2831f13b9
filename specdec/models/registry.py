"""Registry of the supported architectures: a new one is an entry here, and a block it may need.

An entry has what the family differs in from Llama. Defaults of keys, and the meaning of keys, are
those of the configuration classes of transformers 5. Importing this module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from specdec.models.architecture import Architecture
from specdec.models.config_values import count, positive, positive_or_none, unsupported
from specdec.models.layer_patterns import (
    last_layers_windows,
    one_window,
    partial_rope,
    periodic_windows,
    rope_by_type,
    rope_on_some_layers,
    rope_on_windows,
    window_if_used,
    windows_without_rope,
)
from specdec.models.rope import rotary_fraction
from specdec.models.traits import (
    Activation,
    DecoderTraits,
    Experts,
    LogitTransform,
    NormKind,
    QkNorm,
    TensorNames,
)


def _granite_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    return DecoderTraits(
        attention_scale=positive(raw, "attention_multiplier"),
        embedding_scale=positive(raw, "embedding_multiplier"),
        residual_scale=positive(raw, "residual_multiplier"),
        logits=LogitTransform(scale=1 / positive(raw, "logits_scaling")),
    )


def _olmo2_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    del raw
    return DecoderTraits(has_input_norms=False, has_output_norms=True, qk_norm=QkNorm.ALL_HEADS)


def _phi3_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    del raw
    return DecoderTraits(names=TensorNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",)))


def _glm_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    del raw
    return DecoderTraits(is_rope_interleaved=True, names=TensorNames(gate_up=("gate_up_proj",)))


def _glm4_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    del raw
    names = TensorNames(
        gate_up=("gate_up_proj",),
        attention_output_norm="post_self_attn_layernorm",
        mlp_output_norm="post_mlp_layernorm",
    )
    return DecoderTraits(is_rope_interleaved=True, has_output_norms=True, names=names)


def _gemma_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    scale = math.sqrt(count(raw, "hidden_size"))
    return DecoderTraits(adds_one_to_norms=True, embedding_scale=scale)


def _gemma2_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    softcap = positive_or_none(raw, "attn_logit_softcapping")
    return replace(_gemma3_traits(raw), attention_softcap=softcap)


def _gemma3_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    return DecoderTraits(
        adds_one_to_norms=True,
        has_output_norms=True,
        attention_scale=positive(raw, "query_pre_attn_scalar") ** -0.5,
        embedding_scale=math.sqrt(count(raw, "hidden_size")),
        logits=LogitTransform(softcap=positive_or_none(raw, "final_logit_softcapping")),
        names=TensorNames(mlp_norm="pre_feedforward_layernorm"),
    )


def _starcoder2_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    del raw
    names = TensorNames(gate_up=("c_fc",), down="c_proj")
    return DecoderTraits(norm=NormKind.LAYER, has_norm_bias=True, has_gate=False, names=names)


def _cohere_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    return DecoderTraits(
        norm=NormKind.LAYER,
        is_parallel=True,
        is_rope_interleaved=True,
        qk_norm=QkNorm.EACH_HEAD,
        logits=LogitTransform(scale=positive(raw, "logit_scale")),
    )


def _mixtral_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    del raw
    names = TensorNames(gate_up=("w1", "w3"), down="w2", mlp="block_sparse_moe")
    return DecoderTraits(names=names)


def _mixtral_experts(raw: Mapping[str, Any], num_layers: int) -> Experts:
    return Experts(
        count(raw, "num_local_experts"),
        _experts_per_token(raw, "num_local_experts"),
        normalizes=True,
        intermediate_size=count(raw, "intermediate_size"),
        layers=frozenset(range(num_layers)),
    )


def _qwen3_moe_experts(raw: Mapping[str, Any], num_layers: int) -> Experts | None:
    step, dense = count(raw, "decoder_sparse_step"), raw.get("mlp_only_layers") or []
    layers = {index for index in range(num_layers) if (index + 1) % step == 0}.difference(dense)
    # transformers 5 writes the first name, the published files have the second.
    key = "num_local_experts" if "num_local_experts" in raw else "num_experts"
    return Experts(
        count(raw, key),
        _experts_per_token(raw, key),
        normalizes=bool(raw.get("norm_topk_prob")),
        intermediate_size=count(raw, "moe_intermediate_size"),
        layers=frozenset(layers),
    )


def _olmoe_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    if raw.get("clip_qkv") is not None:
        raise unsupported("clip_qkv", raw["clip_qkv"], "null")
    return DecoderTraits(qk_norm=QkNorm.ALL_HEADS)


def _olmoe_experts(raw: Mapping[str, Any], num_layers: int) -> Experts:
    return Experts(
        count(raw, "num_experts"),
        _experts_per_token(raw, "num_experts"),
        normalizes=bool(raw.get("norm_topk_prob")),
        intermediate_size=count(raw, "intermediate_size"),
        layers=frozenset(range(num_layers)),
    )


def _experts_per_token(raw: Mapping[str, Any], count_key: str) -> int:
    found, limit = count(raw, "num_experts_per_tok"), count(raw, count_key)
    if found > limit:
        raise unsupported("num_experts_per_tok", found, f"at most {count_key} ({limit})")
    return found


_QWEN_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_GRANITE_DEFAULTS = {
    f"{name}_multiplier": 1.0 for name in ("attention", "embedding", "residual")
} | {"logits_scaling": 1.0}
_GELU = Activation.GELU_TANH.value
_GLM_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
_GEMMA_DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True}
_GEMMA2_DEFAULTS = {
    **_GEMMA_DEFAULTS,
    "num_key_value_heads": 4,
    "hidden_activation": _GELU,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_COHERE_DEFAULTS = {"logit_scale": 0.0625, "tie_word_embeddings": True}

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "LlamaForCausalLM": Architecture(
            "llama",
            ("Llama 2, 3, 3.1, 3.2, 3.3", "SmolLM 1, 2", "TinyLlama", "Yi"),
            "biases by `attention_bias` and `mlp_bias`",
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            mlp_bias="mlp_bias",
        ),
        "MistralForCausalLM": Architecture(
            "mistral",
            ("Mistral 7B", "Mistral Nemo", "Mistral Small", "Ministral 8B"),
            "one sliding window for all layers, or none",
            {"num_key_value_heads": 8, "sliding_window": 4096},
            windows=one_window,
        ),
        "Qwen2ForCausalLM": Architecture(
            "qwen2",
            ("Qwen 2, 2.5", "QwQ 32B", "DeepSeek-R1-Distill-Qwen"),
            "QKV bias; windows on the last layers or by `layer_types`",
            _QWEN_DEFAULTS,
            qkv_bias=True,
            windows=last_layers_windows,
        ),
        "Qwen3ForCausalLM": Architecture(
            "qwen3",
            ("Qwen 3, 0.6B to 32B",),
            "queries and keys normalized by head; windows as in Qwen 2",
            {**_QWEN_DEFAULTS, "head_dim": 128},
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            qk_norm=True,
            windows=last_layers_windows,
        ),
        "GraniteForCausalLM": Architecture(
            "granite",
            ("Granite 3.0 to 3.3",),
            "scaled embeddings, scores, residual stream and logits; biases as in Llama",
            _GRANITE_DEFAULTS,
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            mlp_bias="mlp_bias",
            traits=_granite_traits,
        ),
        "SmolLM3ForCausalLM": Architecture(
            "smollm3",
            ("SmolLM3 3B",),
            "layers without rotary embedding; windows by `layer_types`; biases as in Llama",
            {
                "num_key_value_heads": 4,
                "no_rope_layer_interval": 4,
                "rope_theta": 2_000_000.0,
                "sliding_window": None,
                "tie_word_embeddings": True,
            },
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            mlp_bias="mlp_bias",
            windows=windows_without_rope,
            ropes=rope_on_some_layers,
        ),
        "Olmo2ForCausalLM": Architecture(
            "olmo2",
            ("OLMo 2 1B to 32B",),
            "norms behind attention and MLP instead of before; queries and keys normalized over "
            "all heads",
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            qk_norm=True,
            traits=_olmo2_traits,
        ),
        "Olmo3ForCausalLM": Architecture(
            "olmo3",
            ("OLMo 3 7B and 32B",),
            "as OLMo 2; windows on three of four layers; rotary scaling on the others",
            {"sliding_window": 4096, "rope_theta": 500_000.0},
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            qk_norm=True,
            windows=periodic_windows(4),
            ropes=rope_by_type("rope_theta"),
            traits=_olmo2_traits,
        ),
        "Phi3ForCausalLM": Architecture(
            "phi3",
            ("Phi-3, Phi-3.5", "Phi-4, Phi-4 mini, Phi-4 reasoning"),
            "fused QKV and gate-up tensors; rotation of a part of each head; LongRoPE",
            {"original_max_position_embeddings": 4096, "sliding_window": None},
            windows=one_window,
            ropes=partial_rope,
            rotary_fraction=rotary_fraction,
            traits=_phi3_traits,
        ),
        "GlmForCausalLM": Architecture(
            "glm",
            ("GLM-4 9B (`-hf`)", "GLM-Edge"),
            "interleaved rotation of half of each head; fused gate-up tensor; QKV bias",
            _GLM_DEFAULTS,
            qkv_bias="attention_bias",
            ropes=partial_rope,
            rotary_fraction=rotary_fraction,
            traits=_glm_traits,
        ),
        "Glm4ForCausalLM": Architecture(
            "glm4",
            ("GLM-4-0414 9B and 32B", "GLM-Z1"),
            "as GLM, with norms before and behind attention and MLP",
            _GLM_DEFAULTS,
            qkv_bias="attention_bias",
            ropes=partial_rope,
            rotary_fraction=rotary_fraction,
            traits=_glm4_traits,
        ),
        "GemmaForCausalLM": Architecture(
            "gemma",
            ("Gemma 2B and 7B", "CodeGemma"),
            "scaled embeddings; gated GELU; norms whose weights are stored less one",
            {**_GEMMA_DEFAULTS, "num_key_value_heads": 16, "hidden_act": _GELU},
            # The first releases have `gelu` and mean the approximation.
            legacy_activations={"gelu": Activation.GELU_TANH},
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            traits=_gemma_traits,
        ),
        "Gemma2ForCausalLM": Architecture(
            "gemma2",
            ("Gemma 2 2B, 9B and 27B",),
            "as Gemma, with norms before and behind, soft-capped scores and logits, and windows on "
            "alternating layers",
            {
                **_GEMMA2_DEFAULTS,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
            },
            activation_key="hidden_activation",
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            windows=periodic_windows(2),
            traits=_gemma2_traits,
        ),
        "Gemma3ForCausalLM": Architecture(
            "gemma3_text",
            ("Gemma 3 270M and 1B",),
            "as Gemma 2, without caps; queries and keys normalized by head; windows on five of six "
            "layers, with a rotary embedding of their own",
            {
                **_GEMMA2_DEFAULTS,
                "rope_theta": 1_000_000.0,
                "rope_local_base_freq": 10_000.0,
            },
            activation_key="hidden_activation",
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            qk_norm=True,
            windows=periodic_windows(6, "sliding_window_pattern"),
            ropes=rope_by_type("rope_local_base_freq"),
            traits=_gemma3_traits,
        ),
        "Starcoder2ForCausalLM": Architecture(
            "starcoder2",
            ("StarCoder2 3B, 7B and 15B",),
            "LayerNorm with bias; an MLP of GELU without a gate; biases by `use_bias`",
            {
                "num_key_value_heads": 2,
                "hidden_act": _GELU,
                "use_bias": True,
                "tie_word_embeddings": True,
                "sliding_window": None,
            },
            norm_eps_key="norm_epsilon",
            qkv_bias="use_bias",
            output_bias="use_bias",
            mlp_bias="use_bias",
            windows=one_window,
            traits=_starcoder2_traits,
        ),
        "CohereForCausalLM": Architecture(
            "cohere",
            ("Command R, R+", "Aya 23, Aya Expanse"),
            "attention and MLP in parallel; LayerNorm; interleaved rotation; scaled logits; "
            "queries and keys normalized by `use_qk_norm`",
            {**_COHERE_DEFAULTS, "rope_theta": 500_000.0},
            norm_eps_key="layer_norm_eps",
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            qk_norm="use_qk_norm",
            traits=_cohere_traits,
        ),
        "Cohere2ForCausalLM": Architecture(
            "cohere2",
            ("Command R7B", "Command A"),
            "as Cohere; windows with rotation on three of four layers, neither on the others",
            {**_COHERE_DEFAULTS, "sliding_window": 4096},
            norm_eps_key="layer_norm_eps",
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            windows=periodic_windows(4, "sliding_window_pattern"),
            ropes=rope_on_windows,
            traits=_cohere_traits,
        ),
        "MixtralForCausalLM": Architecture(
            "mixtral",
            ("Mixtral 8x7B and 8x22B",),
            "a mixture of experts on each layer; one sliding window for all layers, or none",
            {
                "num_key_value_heads": 8,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
                "sliding_window": None,
                "rope_theta": 1_000_000.0,
            },
            windows=one_window,
            traits=_mixtral_traits,
            experts=_mixtral_experts,
        ),
        "Qwen3MoeForCausalLM": Architecture(
            "qwen3_moe",
            ("Qwen 3 30B-A3B and 235B-A22B",),
            "as Qwen 3, with a mixture of experts on all or some layers",
            {
                "num_key_value_heads": 4,
                "sliding_window": 4096,
                "decoder_sparse_step": 1,
                "moe_intermediate_size": 768,
                "num_experts_per_tok": 8,
                "num_experts": 128,
            },
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            qk_norm=True,
            windows=window_if_used,
            experts=_qwen3_moe_experts,
        ),
        "OlmoeForCausalLM": Architecture(
            "olmoe",
            ("OLMoE 1B-7B",),
            "a mixture of experts on each layer; queries and keys normalized over all heads",
            {"num_experts_per_tok": 8, "num_experts": 64},
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            qk_norm=True,
            traits=_olmoe_traits,
            experts=_olmoe_experts,
        ),
    }
)
"""The architectures by the name that config.json has for them."""

SUPPORTED_ARCHITECTURES = tuple(ARCHITECTURES)

SAME_DECODERS: Mapping[str, str] = MappingProxyType({"MiMoForCausalLM": "Qwen2ForCausalLM"})
"""Architectures whose decoder is that of another one: they add only layers for drafting."""

_MODEL_TYPES = MappingProxyType(
    {each.model_type: name for name, each in ARCHITECTURES.items()} | {"mimo": "MiMoForCausalLM"}
)


def architecture_of(model_type: str) -> str | None:
    """Return the architecture of a `model_type`, which a config.json may have alone; else None."""
    return _MODEL_TYPES.get(model_type)
