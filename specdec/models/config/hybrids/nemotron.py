"""Nemotron-H: layers that are Mamba-2, attention, an MLP or a mixture alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specdec.config.json_values import count, overlaid, unsupported
from specdec.models.config.architecture import Architecture
from specdec.models.config.families.family_traits import deepseek_v3_experts
from specdec.models.config.hybrids.layer_types import FULL, LINEAR, PUBLISHED_TYPES
from specdec.models.config.hybrids.state_spaces import StateSpaceKeys, state_space
from specdec.models.config.layer_patterns import no_ropes
from specdec.models.config.recurrent import Recurrent
from specdec.models.config.traits import Activation, DecoderTraits, Experts, TensorNames

_MLP, _MIXTURE = "mlp", "moe"
_LETTERS = {"M": LINEAR, "*": FULL, "-": _MLP, "E": _MIXTURE}
"""Types of layers in `hybrid_override_pattern`, which published files have."""

_OLDER = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit",
}
"""Keys that have the values of others, in files of other programs."""

_KEYS = StateSpaceKeys(
    "mamba_num_heads",
    "mamba_head_dim",
    "n_groups",
    "ssm_state_size",
    "conv_kernel",
    "use_bias",
    "use_conv_bias",
)


def _canonical(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of Nemotron-H with the types and the number of layers."""
    renamed = {other: raw[name] for name, other in _OLDER.items() if raw.get(name) is not None}
    types = _layer_types(raw)
    if _MIXTURE in types and raw["mlp_bias"]:
        raise unsupported("mlp_bias", raw["mlp_bias"], "false in a model with experts")
    return overlaid(raw, **renamed, layer_types=types, num_hidden_layers=len(types))


def _layer_types(raw: Mapping[str, Any]) -> list[str]:
    key, allowed = "layers_block_type", tuple(_LETTERS.values())
    if raw.get(key) is None:
        key, allowed = "hybrid_override_pattern", tuple(_LETTERS)
    given = raw.get(key)
    if isinstance(given, list | str):
        names = PUBLISHED_TYPES | _LETTERS
        types = [names.get(each, each) for each in given]
        if {LINEAR, FULL} <= {*types} <= {*_LETTERS.values()}:
            return types
    raise unsupported(key, given, f"of {', '.join(allowed)}, with both first ones")


def _experts(raw: Mapping[str, Any], num_layers: int) -> Experts | None:
    layers = _of_types(raw, _MIXTURE)
    if not layers:
        return None
    found = deepseek_v3_experts(overlaid(raw, first_k_dense_replace=0), num_layers)
    size = None if raw["moe_latent_size"] is None else count(raw, "moe_latent_size")
    shared_size = count(raw, "moe_shared_expert_intermediate_size")
    return replace(found, layers=layers, shared_size=shared_size, latent_size=size)


def _recurrent(raw: Mapping[str, Any], num_layers: int) -> Recurrent:
    del num_layers
    kind = replace(state_space(raw, keys=_KEYS), prefix="mixer")
    return Recurrent(_of_types(raw, LINEAR), kind, mlps=_of_types(raw, _MLP, _MIXTURE))


def _of_types(raw: Mapping[str, Any], *types: str) -> frozenset[int]:
    return frozenset(index for index, each in enumerate(raw["layer_types"]) if each in types)


NEMOTRON_H = Architecture(
    "nemotron_h",
    ("Nemotron-H 8B, 47B, 56B", "Nemotron Nano 2 9B, 12B", "Nemotron 3 Nano, Super"),
    "each layer is Mamba-2, attention without rotation, an MLP of squared ReLU or a mixture of "
    "experts alone; experts may read latents",
    {
        "num_hidden_layers": None,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 21504,
        "max_position_embeddings": 4096,
        "layer_norm_epsilon": 1e-5,
        "mlp_hidden_act": "relu2",
        "mlp_bias": False,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "moe_latent_size": None,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    },
    norm_eps_key="layer_norm_epsilon",
    activation_key="mlp_hidden_act",
    legacy_activations={"relu2": Activation.RELU2},
    mlp_bias="mlp_bias",
    ropes=no_ropes,
    traits=DecoderTraits(
        has_one_block=True,
        has_gate=False,
        names=TensorNames(
            attention="mixer",
            mlp="mixer",
            gate_up=("up_proj",),
            input_norm="norm",
            final_norm="model.norm_f",
        ),
    ),
    experts=_experts,
    recurrent=_recurrent,
    canonical=_canonical,
)
