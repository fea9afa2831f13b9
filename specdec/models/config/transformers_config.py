"""Shapes of the models that transformers' modelling code runs, read from their configuration.

Imports transformers, and with it torch, where such a model is read, and not before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from specdec.models.weights.tensor_headers import TensorHeaders, require_values
from specdec.models.weights.weight_files import find_weight_files, read_headers
from specdec.types.errors import UnsupportedModelError

_KV_HEADS_OF_MULTI_QUERY = 1
_MAX_REASON_CHARS = 300

BY_OUTPUTS, BY_INPUTS = "colwise", "rowwise"
"""Styles of a layer that divides its outputs, and of one whose inputs are divided."""

PACKED_BY_OUTPUTS, PACKED_BY_INPUTS = "packed_colwise", "packed_rowwise"
"""Styles for a tensor of two projections side by side, of which each is divided."""

SUMMED_EXPERTS = "moe_tp_experts"
"""Style of a mixture whose experts' hidden units are divided: ranks add up its results."""

BY_EXPERT, ROUTED_EXPERTS = "grouped_gemm", "ep_dispatch_experts"
"""Styles of a tensor that is divided by expert, and of a mixture of which a rank has whole ones."""

_KEY_PROJECTIONS = (".k_proj", ".qkv_proj", ".query_key_value")
"""Ends of the names of layers with the keys of attention, alone or beside others."""

_WHOLE_STYLES = ("replicate", "replicated_with_grad_allreduce")

_PLAN_STYLES = (
    *(BY_OUTPUTS, BY_INPUTS, PACKED_BY_OUTPUTS, PACKED_BY_INPUTS),
    *(SUMMED_EXPERTS, BY_EXPERT, ROUTED_EXPERTS, *_WHOLE_STYLES),
)
"""Styles of a plan that `specdec.models.transformers.transformers_parallel` applies."""


@dataclass(frozen=True)
class TransformersModel:
    """A model that transformers' modelling code runs.

    class_name: of its `PreTrainedModel`. num_parameters: weights in its files. parallel_fault: why
    several ranks cannot share it, whatever its sizes are; empty where they can. expert_fault: the
    same for ranks with whole experts. is_divided_by_expert: whether they have these.
    """

    class_name: str
    num_parameters: int
    parallel_fault: str = ""
    expert_fault: str = ""
    is_divided_by_expert: bool = False


_COUNTS_POSITIONS = ("llama4_text",)
"""Models whose attention does not read the positions that it is given."""

_DIFFERENT_HEADS = ("mimo_v2_flash",)
"""Models whose layers have different numbers of KV heads."""


@dataclass(frozen=True)
class TransformersShape:
    """Facts about such a model that the engine needs, from its configuration.

    head_dim: of keys; those of values may be shorter, and are padded.
    """

    model: TransformersModel
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool


def transformers_fault(raw: Mapping[str, Any]) -> str | None:
    """Return why transformers' modelling code cannot run a model here; None where it can.

    raw: its config.json. Attention that cannot be replaced is found when the model is loaded.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = raw.get("model_type")
    if model_type not in CONFIG_MAPPING_NAMES:
        return f"transformers has no model_type {str(model_type)[:100]!r}"
    if raw.get("is_encoder_decoder") or model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return f"transformers has no causal language model for {model_type}"
    if model_type in _COUNTS_POSITIONS:
        return f"the attention of {model_type} counts the positions of a batch like one text"
    if model_type in _DIFFERENT_HEADS:
        return f"the layers of {model_type} have different numbers of KV heads"
    if raw.get("quantization_config") is not None:
        return "transformers' code reads no quantized weights here"
    model = _model_class(str(model_type))
    names = raw.get("architectures") or [model.__name__]
    if names[0] != model.__name__:
        return f"the causal language model of {model_type} in transformers is {model.__name__}"
    return _fault_of_class(model)


def read_transformers_shape(directory: Path) -> TransformersShape:
    """Read the shape of the model in a directory.

    Raises UnsupportedModelError for a configuration that transformers refuses or that lacks a size,
    and for weights that are not there or are codes.
    """
    config = _read_config(directory)
    num_heads = _size(config, "num_attention_heads")
    hidden_size = _size(config, "hidden_size")
    headers = read_headers(find_weight_files(directory))
    for name in headers:
        if name.endswith(".weight"):
            require_values(TensorHeaders(headers), name)
    return TransformersShape(
        model=TransformersModel(
            _model_class(config.model_type).__name__,
            sum(prod(header.shape) for header in headers.values()),
            _parallel_fault(config),
            _expert_fault(config),
        ),
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * hidden_size,
        num_layers=_size(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(config, num_heads),
        head_dim=_head_dim(config, hidden_size // num_heads),
        max_position_embeddings=_size(config, "max_position_embeddings"),
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
    )


def _read_config(directory: Path) -> Any:
    from transformers import AutoConfig

    try:
        whole = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        config = whole.get_text_config(decoder=True)
    except Exception as error:  # transformers raises any exception for invalid files
        reason = " ".join(str(error).split())[:_MAX_REASON_CHARS]
        raise UnsupportedModelError(f"transformers cannot read {directory}: {reason}") from error
    if config.to_dict().get("per_layer_config"):
        raise UnsupportedModelError(
            f"{directory}: the layers of {config.model_type} have heads of different sizes"
        )
    if _has_long_rope(config):
        raise UnsupportedModelError(
            f"{directory}: transformers selects LongRoPE's factors by the length of each text, so "
            "cached keys of a text do not fit once it has grown"
        )
    return config


def _has_long_rope(config: Any) -> bool:
    """Return whether layers, or those of one type, have LongRoPE."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_type = (each for each in rope.values() if isinstance(each, dict))
    return any(each.get("rope_type") == "longrope" for each in (rope, *by_type))


def _model_class(model_type: str) -> Any:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def _fault_of_class(model: Any) -> str | None:
    if model._is_stateful:
        return (
            f"{model.__name__} has layers with a state (state-space, linear attention or "
            "convolutions), which transformers' code cannot roll back to an accepted draft"
        )
    if not model._supports_attention_backend:
        return f"{model.__name__} of transformers takes no attention function, so no paged KV cache"
    return None


def parallel_plan(config: Any, *, divides_by_expert: bool) -> Mapping[str, str]:
    """Return the styles by which ranks divide a model of transformers, by names of its parts.

    `*` in a name stands for the index of a layer. divides_by_expert: whether ranks have whole
    experts of mixtures, for which transformers replaces a part of the plan.
    """
    plan = dict(getattr(config, "base_model_tp_plan", None) or {})
    of_experts = getattr(config, "base_model_ep_plan", None) if divides_by_expert else None
    return plan | (of_experts or {})


def _parallel_fault(config: Any) -> str:
    """Return why the plan of transformers cannot divide a model; empty where it can."""
    if not getattr(config, "base_model_tp_plan", None):
        return f"transformers has no tensor-parallel plan for {config.model_type}"
    if getattr(config, "kv_lora_rank", None):
        return "latent attention is not divided by transformers' plan"
    plan = parallel_plan(config, divides_by_expert=False)
    of_keys = (style for name, style in plan.items() if name.endswith(_KEY_PROJECTIONS))
    if BY_OUTPUTS not in of_keys:
        return _fault_of_plan(plan) or "transformers' plan divides no attention, whose KV all have"
    return _fault_of_plan(plan)


def _expert_fault(config: Any) -> str:
    """Return why ranks cannot have whole experts of a model; empty where they can."""
    if not getattr(config, "base_model_ep_plan", None):
        return f"transformers has no expert-parallel plan for {config.model_type}"
    return _fault_of_plan(parallel_plan(config, divides_by_expert=True))


def _fault_of_plan(plan: Mapping[str, str]) -> str:
    for name, style in plan.items():
        if style not in _PLAN_STYLES:
            return f"transformers' plan divides {name} as {style}, which is not supported"
    return ""


def _size(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    if type(value) is not int or value < 1:
        raise UnsupportedModelError(f"{name} of the model is {value!r}; it must be at least 1")
    return value


def _num_kv_heads(config: Any, num_heads: int) -> int:
    if getattr(config, "multi_query", False):
        return _KV_HEADS_OF_MULTI_QUERY
    return getattr(config, "num_key_value_heads", None) or num_heads


def _head_dim(config: Any, default: int) -> int:
    """Return the width of a key: with latent attention, its two parts side by side."""
    if getattr(config, "kv_lora_rank", None):
        return _size(config, "qk_nope_head_dim") + _size(config, "qk_rope_head_dim")
    return getattr(config, "head_dim", None) or default
