"""What the layers of each family have beside Llama, by its `config.json` with its defaults."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from specdec.config.json_values import count, positive, positive_or_none, unsupported
from specdec.models.config.attention.latent import Latent
from specdec.models.config.traits import (
    DecoderTraits,
    Experts,
    LogitTransform,
    NormKind,
    QkNorm,
    Routing,
    TensorNames,
)

OLMO2 = DecoderTraits(has_input_norms=False, has_output_norms=True, qk_norm=QkNorm.ALL_HEADS)
"""The traits of OLMo 2 and 3."""


def granite_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    """Return the traits of Granite."""
    return DecoderTraits(
        attention_scale=positive(raw, "attention_multiplier"),
        embedding_scale=positive(raw, "embedding_multiplier"),
        residual_scale=positive(raw, "residual_multiplier"),
        logits=LogitTransform(scale=1 / positive(raw, "logits_scaling")),
    )


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


def cohere_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    """Return the traits of Command R and A."""
    return DecoderTraits(
        norm=NormKind.LAYER,
        is_parallel=True,
        is_rope_interleaved=True,
        qk_norm=QkNorm.EACH_HEAD,
        logits=LogitTransform(scale=positive(raw, "logit_scale")),
    )


MIXTRAL_NAMES = TensorNames(
    gate_up=("w1", "w3"),
    down="w2",
    mlp="block_sparse_moe",
    choice_bias="e_score_correction_bias",
)


def read_experts(
    raw: Mapping[str, Any],
    count_key: str,
    layers: Iterable[int],
    *,
    per_token_key: str = "num_experts_per_tok",
    size_key: str = "moe_intermediate_size",
    normalizes: bool = True,
) -> Experts:
    """Return a mixture by the keys of its experts, of those of a token, and of their units."""
    num_experts, per_token = count(raw, count_key), count(raw, per_token_key)
    if per_token > num_experts:
        raise unsupported(per_token_key, per_token, f"at most {count_key} ({num_experts})")
    return Experts(num_experts, per_token, normalizes, count(raw, size_key), frozenset(layers))


def mixtral_experts(raw: Mapping[str, Any], num_layers: int) -> Experts:
    """Return the experts of Mixtral."""
    layers = range(num_layers)
    return read_experts(raw, "num_local_experts", layers, size_key="intermediate_size")


def minimax_m2_experts(raw: Mapping[str, Any], num_layers: int) -> Experts:
    """Return the experts of MiniMax-M2: chosen by sigmoids and a bias, without groups."""
    routing = Routing(is_sigmoid=True, has_bias=True)
    return replace(mixtral_experts(raw, num_layers), routing=routing)


def qwen3_moe_experts(raw: Mapping[str, Any], num_layers: int) -> Experts:
    """Return the experts of Qwen 3 MoE."""
    step, dense = count(raw, "decoder_sparse_step"), raw.get("mlp_only_layers") or []
    layers = {index for index in range(num_layers) if (index + 1) % step == 0}.difference(dense)
    # transformers 5 writes the first name, the published files have the second.
    key = "num_local_experts" if "num_local_experts" in raw else "num_experts"
    return read_experts(raw, key, layers, normalizes=bool(raw.get("norm_topk_prob")))


def gated_shared_experts(raw: Mapping[str, Any], num_layers: int) -> Experts | None:
    """Return the experts of Qwen 3 MoE beside a gated shared one; None without such layers."""
    found = qwen3_moe_experts(raw, num_layers)
    if not found.layers:
        return None
    size = count(raw, "shared_expert_intermediate_size")
    return replace(found, shared_size=size, has_shared_gate=True)


def olmoe_experts(raw: Mapping[str, Any], num_layers: int) -> Experts:
    """Return the experts of OLMoE."""
    layers, normalizes = range(num_layers), bool(raw.get("norm_topk_prob"))
    key = "intermediate_size"
    return read_experts(raw, "num_experts", layers, size_key=key, normalizes=normalizes)


def gpt_oss_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    """Return the traits of GPT-OSS."""
    for name, only in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if raw[name] != only:
            raise unsupported(name, raw[name], str(only))
    return DecoderTraits(has_sinks=True, names=TensorNames(router="router"))


def gpt_oss_experts(raw: Mapping[str, Any], num_layers: int) -> Experts:
    """Return the experts of GPT-OSS: a softmax over the chosen ones is one over all, normalized."""
    return replace(mixtral_experts(raw, num_layers), has_bias=True)


def deepseek_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    """Return the traits of DeepSeek-V2 and V3: the scale of scores grows with YaRN's factor."""
    for name in ("attention_bias", "mlp_bias"):
        if raw.get(name):
            raise unsupported(name, raw[name], "false")
    scale = deepseek_latent(raw).query_dim ** -0.5
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    weight = rope.get("mscale_all_dim") if isinstance(rope, dict) else None
    if weight and rope.get("rope_type", rope.get("type")) != "default":
        factor = positive(rope, "factor")
        scale *= (0.1 * positive(rope, "mscale_all_dim") * math.log(max(factor, 1.0)) + 1.0) ** 2
    return DecoderTraits(attention_scale=scale)


def deepseek_latent(raw: Mapping[str, Any]) -> Latent:
    """Return the sizes of the latent attention of DeepSeek-V2 and V3."""
    return Latent(
        rank=count(raw, "kv_lora_rank"),
        query_rank=None if raw.get("q_lora_rank") is None else count(raw, "q_lora_rank"),
        plain_dim=count(raw, "qk_nope_head_dim"),
        rope_dim=count(raw, "qk_rope_head_dim"),
        value_dim=count(raw, "v_head_dim"),
        is_rope_interleaved=bool(raw.get("rope_interleave", True)),
    )


def deepseek_v2_experts(raw: Mapping[str, Any], num_layers: int) -> Experts:
    """Return the experts of DeepSeek-V2."""
    method = raw["topk_method"]
    if method not in ("greedy", "group_limited_greedy"):
        raise unsupported("topk_method", method, "greedy or group_limited_greedy")
    if raw.get("norm_topk_prob"):
        raise unsupported("norm_topk_prob", True, "false, as transformers ignores it")
    has_groups = method == "group_limited_greedy"
    return _deepseek_experts(raw, num_layers, has_groups=has_groups, is_sigmoid=False)


def deepseek_v3_experts(raw: Mapping[str, Any], num_layers: int) -> Experts:
    """Return the experts of DeepSeek-V3."""
    return _deepseek_experts(raw, num_layers, has_groups=True, is_sigmoid=True)


def mistral4_experts(raw: Mapping[str, Any], num_layers: int) -> Experts:
    """Return the experts of Mistral 4: as DeepSeek-V3's, with a softmax and without a bias."""
    return _deepseek_experts(raw, num_layers, has_groups=True, is_sigmoid=False, adds_two_best=True)


def _deepseek_experts(
    raw: Mapping[str, Any],
    num_layers: int,
    *,
    has_groups: bool,
    is_sigmoid: bool,
    adds_two_best: bool = False,
) -> Experts:
    adds_two_best |= is_sigmoid
    num_experts = count(raw, "n_routed_experts")
    num_groups = count(raw, "n_group") if has_groups else 1
    if num_experts % num_groups or (adds_two_best and 1 < num_groups > num_experts // 2):
        limit = f"a divisor of n_routed_experts ({num_experts}), at most half of it"
        raise unsupported("n_group", num_groups, limit)
    num_chosen = count(raw, "topk_group") if has_groups else 1
    if num_chosen > num_groups:
        raise unsupported("topk_group", num_chosen, f"at most n_group ({num_groups})")
    num_allowed = num_chosen * (num_experts // num_groups)
    if count(raw, "num_experts_per_tok") > num_allowed:
        limit = f"at most {num_allowed}, the experts of topk_group groups"
        raise unsupported("num_experts_per_tok", raw["num_experts_per_tok"], limit)
    routing = Routing(
        is_sigmoid=is_sigmoid,
        num_groups=num_groups,
        num_chosen_groups=num_chosen,
        has_bias=is_sigmoid,
        scale=positive(raw, "routed_scaling_factor"),
        adds_two_best=adds_two_best,
    )
    layers = range(raw["first_k_dense_replace"], num_layers)
    normalizes = adds_two_best and bool(raw["norm_topk_prob"])
    found = read_experts(raw, "n_routed_experts", layers, normalizes=normalizes)
    shared_size = found.intermediate_size * count(raw, "n_shared_experts")
    return replace(found, routing=routing, shared_size=shared_size)


def stablelm_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    """Return the traits of StableLM."""
    if raw.get("qk_layernorm"):
        raise unsupported("qk_layernorm", raw["qk_layernorm"], "false")
    is_parallel = bool(raw.get("use_parallel_residual"))
    return DecoderTraits(norm=NormKind.LAYER, has_norm_bias=True, is_parallel=is_parallel)


def lfm2_moe_experts(raw: Mapping[str, Any], num_layers: int) -> Experts:
    """Return the experts of LFM2: chosen by sigmoids, without groups."""
    layers, normalizes = range(raw["num_dense_layers"], num_layers), bool(raw["norm_topk_prob"])
    routing = Routing(
        is_sigmoid=True,
        has_bias=bool(raw["use_expert_bias"]),
        scale=positive(raw, "routed_scaling_factor"),
    )
    found = read_experts(raw, "num_experts", layers, normalizes=normalizes)
    return replace(found, routing=routing)
