"""Families whose queries attend to tokens that an indexer chooses: DeepSeek-V3.2 and GLM-5."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from specdec.config.json_values import count, unsupported
from specdec.models.config.architecture import Architecture
from specdec.models.config.attention.latent import Indexer, Latent
from specdec.models.config.families.family_traits import deepseek_latent, deepseek_traits
from specdec.models.config.families.sigmoid_mixtures import experts_by_type
from specdec.models.config.layer_patterns import Windows, no_windows

_INDEXED, _FULL, _SHARED = "indexed_attention", "full", "shared"
_LETTERS = {"F": _FULL, "S": _SHARED}


def _windows(raw: Mapping[str, Any], num_layers: int) -> Windows:
    types = raw.get("layer_types")
    if types not in (None, [_INDEXED] * num_layers):
        raise unsupported("layer_types", types, f"{num_layers} times {_INDEXED}")
    return no_windows(raw, num_layers)


def _latent(*, is_interleaved: bool) -> Callable[[Mapping[str, Any]], Latent]:
    """Return the rule for latents with an indexer. is_interleaved: the rotation of the latter."""

    def latent(raw: Mapping[str, Any]) -> Latent:
        found = deepseek_latent(raw)
        if found.query_rank is None:
            raise unsupported("q_lora_rank", None, "a number: the indexer reads latents of queries")
        dim = count(raw, "index_head_dim")
        if dim < found.rope_dim:
            limit = f"at least qk_rope_head_dim ({found.rope_dim})"
            raise unsupported("index_head_dim", dim, limit)
        given = raw.get("indexer_rope_interleave", is_interleaved)
        if given is not is_interleaved:
            raise unsupported("indexer_rope_interleave", given, str(is_interleaved).lower())
        layers = _choosing_layers(raw, count(raw, "num_hidden_layers"))
        sizes = count(raw, "index_topk"), count(raw, "index_n_heads"), dim
        return replace(found, indexer=Indexer(*sizes, is_interleaved, layers))

    return latent


def _choosing_layers(raw: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    """Return the layers with an indexer of their own.

    Raises UnsupportedModelError where the first layer has none.
    """
    key = "indexer_types" if raw.get("indexer_types") is not None else "index_topk_pattern"
    types = raw.get(key)
    if types is None:
        every, first = count(raw, "index_topk_freq"), count(raw, "index_skip_topk_offset")
        steps = (max(index - first + 1, 0) for index in range(num_layers))
        types = [_SHARED if step % every else _FULL for step in steps]
    names = [_LETTERS.get(each, each) for each in types] if isinstance(types, list | str) else []
    if len(names) != num_layers or names[0] != _FULL or {*names} - {_FULL, _SHARED}:
        limit = f"{num_layers} times {_FULL} or {_SHARED}, {_FULL} in the first layer"
        raise unsupported(key, types, limit)
    return frozenset(index for index, each in enumerate(names) if each == _FULL)


_DEFAULTS = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_topk_freq": 1,
    "index_skip_topk_offset": 2,
}

SPARSE_ATTENTION: Mapping[str, Architecture] = {
    "DeepseekV32ForCausalLM": Architecture(
        "deepseek_v32",
        ("DeepSeek-V3.2, V3.2-Exp, V3.2-Speciale",),
        "as DeepSeek-V3; an indexer chooses the tokens that a query attends to",
        {
            **_DEFAULTS,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "rms_norm_eps": 1e-6,
            "n_group": 8,
            "topk_group": 4,
            "index_n_heads": 64,
        },
        windows=_windows,
        traits=deepseek_traits,
        latent=_latent(is_interleaved=False),
        experts=experts_by_type,
    ),
    "GlmMoeDsaForCausalLM": Architecture(
        "glm_moe_dsa",
        ("GLM-5",),
        "as DeepSeek-V3.2; a layer may use the choice of an earlier one",
        {
            **_DEFAULTS,
            "q_lora_rank": 2048,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "rms_norm_eps": 1e-5,
            "n_group": 1,
            "topk_group": 1,
            "index_n_heads": 32,
        },
        windows=_windows,
        traits=deepseek_traits,
        latent=_latent(is_interleaved=True),
        experts=experts_by_type,
    ),
}
