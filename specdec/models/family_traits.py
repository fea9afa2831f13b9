"""What the layers of each family have beside Llama, by its `config.json` with its defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specdec.models.config_values import count, positive, positive_or_none, unsupported
from specdec.models.traits import (
    DecoderTraits,
    Experts,
    LogitTransform,
    NormKind,
    QkNorm,
    TensorNames,
)


def granite_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    """Return the traits of Granite."""
    return DecoderTraits(
        attention_scale=positive(raw, "attention_multiplier"),
        embedding_scale=positive(raw, "embedding_multiplier"),
        residual_scale=positive(raw, "residual_multiplier"),
        logits=LogitTransform(scale=1 / positive(raw, "logits_scaling")),
    )


def olmo2_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    """Return the traits of OLMo 2 and 3."""
    del raw
    return DecoderTraits(has_input_norms=False, has_output_norms=True, qk_norm=QkNorm.ALL_HEADS)


def phi3_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    """Return the traits of Phi-3 and Phi-4."""
    del raw
    return DecoderTraits(names=TensorNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",)))


def glm_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    """Return the traits of GLM-4 before its third version."""
    del raw
    return DecoderTraits(is_rope_interleaved=True, names=TensorNames(gate_up=("gate_up_proj",)))


def glm4_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    """Return the traits of GLM-4-0414."""
    del raw
    names = TensorNames(
        gate_up=("gate_up_proj",),
        attention_output_norm="post_self_attn_layernorm",
        mlp_output_norm="post_mlp_layernorm",
    )
    return DecoderTraits(is_rope_interleaved=True, has_output_norms=True, names=names)


def gemma_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    """Return the traits of the first Gemma."""
    scale = math.sqrt(count(raw, "hidden_size"))
    return DecoderTraits(adds_one_to_norms=True, embedding_scale=scale, rounds_embedding_scale=True)


def gemma2_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    """Return the traits of Gemma 2."""
    softcap = positive_or_none(raw, "attn_logit_softcapping")
    return replace(gemma3_traits(raw), attention_softcap=softcap)


def gemma3_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    """Return the traits of Gemma 3."""
    return DecoderTraits(
        adds_one_to_norms=True,
        has_output_norms=True,
        attention_scale=positive(raw, "query_pre_attn_scalar") ** -0.5,
        embedding_scale=math.sqrt(count(raw, "hidden_size")),
        rounds_embedding_scale=True,
        logits=LogitTransform(softcap=positive_or_none(raw, "final_logit_softcapping")),
        names=TensorNames(mlp_norm="pre_feedforward_layernorm"),
    )


def starcoder2_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    """Return the traits of StarCoder2."""
    del raw
    names = TensorNames(gate_up=("c_fc",), down="c_proj")
    return DecoderTraits(norm=NormKind.LAYER, has_norm_bias=True, has_gate=False, names=names)


def cohere_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    """Return the traits of Command R and A."""
    return DecoderTraits(
        norm=NormKind.LAYER,
        is_parallel=True,
        is_rope_interleaved=True,
        qk_norm=QkNorm.EACH_HEAD,
        logits=LogitTransform(scale=positive(raw, "logit_scale")),
    )


def mixtral_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    """Return the traits of Mixtral."""
    del raw
    names = TensorNames(gate_up=("w1", "w3"), down="w2", mlp="block_sparse_moe")
    return DecoderTraits(names=names)


def mixtral_experts(raw: Mapping[str, Any], num_layers: int) -> Experts:
    """Return the experts of Mixtral."""
    return Experts(
        count(raw, "num_local_experts"),
        _experts_per_token(raw, "num_local_experts"),
        normalizes=True,
        intermediate_size=count(raw, "intermediate_size"),
        layers=frozenset(range(num_layers)),
    )


def qwen3_moe_experts(raw: Mapping[str, Any], num_layers: int) -> Experts | None:
    """Return the experts of Qwen 3 MoE."""
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


def olmoe_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    """Return the traits of OLMoE."""
    if raw.get("clip_qkv") is not None:
        raise unsupported("clip_qkv", raw["clip_qkv"], "null")
    return DecoderTraits(qk_norm=QkNorm.ALL_HEADS)


def olmoe_experts(raw: Mapping[str, Any], num_layers: int) -> Experts:
    """Return the experts of OLMoE."""
    return Experts(
        count(raw, "num_experts"),
        _experts_per_token(raw, "num_experts"),
        normalizes=bool(raw.get("norm_topk_prob")),
        intermediate_size=count(raw, "intermediate_size"),
        layers=frozenset(range(num_layers)),
    )


def gpt_oss_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    """Return the traits of GPT-OSS."""
    for name, only in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if raw[name] != only:
            raise unsupported(name, raw[name], str(only))
    return DecoderTraits(has_sinks=True, names=TensorNames(router="router"))


def gpt_oss_experts(raw: Mapping[str, Any], num_layers: int) -> Experts:
    """Return the experts of GPT-OSS: a softmax over the chosen ones is one over all, normalized."""
    return replace(mixtral_experts(raw, num_layers), has_bias=True)


def _experts_per_token(raw: Mapping[str, Any], count_key: str) -> int:
    found, limit = count(raw, "num_experts_per_tok"), count(raw, count_key)
    if found > limit:
        raise unsupported("num_experts_per_tok", found, f"at most {count_key} ({limit})")
    return found


def ernie_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    """Return the traits of ERNIE 4.5."""
    del raw
    return DecoderTraits(is_rope_interleaved=True)


def stablelm_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    """Return the traits of StableLM."""
    if raw.get("qk_layernorm"):
        raise unsupported("qk_layernorm", raw["qk_layernorm"], "false")
    is_parallel = bool(raw.get("use_parallel_residual"))
    return DecoderTraits(norm=NormKind.LAYER, has_norm_bias=True, is_parallel=is_parallel)


def exaone4_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    """Return the traits of EXAONE 4."""
    del raw
    return DecoderTraits(has_input_norms=False, has_output_norms=True)
