"""Why a model cannot be served: its architecture, the reason and what is supported, in one line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from specdec.models.config.families.text_models import TEXT_MODELS
from specdec.models.config.registry import SAME_DECODERS, SUPPORTED_ARCHITECTURES

_STATE_SPACE = ("mamba", "rwkv", "ssm", "jamba", "recurrent", "hyena", "xlstm")
_STATE_KEYS = ("ssm_cfg", "state_size", "mamba_d_state", "mamba_num_heads", "ssm_state_size")
_LINEAR_KEYS = ("linear_num_key_heads", "linear_attn_config", "linear_conv_kernel_dim")
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_REASONS = {
    "mimov2": "its layers have different numbers of KV heads, and values narrower than keys",
    "zamba": "its layers share blocks of attention, which read the embeddings too and have an "
    "adapter for each layer",
}
"""Reasons by a part of a name of an architecture or a model_type, without underscores."""

_WHOLE = "ForConditionalGeneration"
_ENCODERS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")


def explain_unsupported(
    architecture: str | None, raw: Mapping[str, Any], fault: str | None = None
) -> str:
    """Return the message for a model whose architecture is not in the registry.

    architecture: None where config.json names neither an architecture nor a known model_type.
    fault: why transformers' code cannot run it either, if that is known.
    """
    decoders = _shortened((*SUPPORTED_ARCHITECTURES, *SAME_DECODERS), "ForCausalLM")
    supported = f"{decoders}; {_shortened(TEXT_MODELS, _WHOLE)}"
    if architecture is None:
        model_type = raw.get("model_type")
        found = "none" if model_type is None else f"only the model_type {str(model_type)[:100]!r}"
        named = f"config.json names no architecture that is supported ({found})"
    else:
        named = f"architecture {architecture[:100]} is not supported"
    reason = _reason(architecture or str(raw.get("model_type")), raw) or fault
    return f"{named}{f': {reason}' if reason else ''}; supported: {supported}"


def _shortened(names: Iterable[str], suffix: str) -> str:
    """Return names without their common end, which follows them."""
    return f"{', '.join(name.removesuffix(suffix) for name in names)} ({suffix})"


def _reason(name: str, raw: Mapping[str, Any]) -> str | None:
    """Return why the engine cannot run such a model; None where only the registry lacks it."""
    lowered = name.lower()
    for part, reason in _REASONS.items():
        if part in lowered.replace("_", ""):
            return reason
    if raw.get("is_encoder_decoder"):
        return "it is an encoder-decoder, and only decoders have the KV cache that is paged here"
    if any(part in lowered for part in _STATE_SPACE) or any(key in raw for key in _STATE_KEYS):
        return "it has state-space layers, which are not implemented"
    if any(key in raw for key in _LINEAR_KEYS):
        return "it has linear attention of a family that is not implemented"
    if name.endswith(_ENCODERS):
        return "it is an encoder or a classifier, which generates no text"
    if raw.get("kv_lora_rank"):
        return "its multi-head latent attention (MLA) is not implemented"
    if any(raw.get(key) for key in _EXPERT_KEYS):
        return "its mixture of experts is not implemented"
    if "vision_config" in raw or name.endswith(_WHOLE):
        return "it reads images or audio besides text"
    if "auto_map" in raw:
        return "its layers are code of its repository, which is never executed"
    return None
