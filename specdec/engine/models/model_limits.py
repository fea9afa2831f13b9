"""Settings that a model does not have, because of its decoder or its layers."""

from __future__ import annotations

from specdec.config.engine import AdapterLimits
from specdec.config.llm import LLMConfig
from specdec.config.quantization import CHECKPOINT_QUANTIZATIONS
from specdec.config.speculation.methods import DraftModelConfig
from specdec.engine.models.model_resolution import Models
from specdec.models.config.families.native_recurrence import kernels_of_hybrids
from specdec.models.config.model_config import ModelConfig
from specdec.models.config.native_limits import native_fault
from specdec.models.config.recurrent import Recurrent
from specdec.types.errors import InvalidValueError

_REASON = "the model runs by transformers' code"


def check_model_limits(config: LLMConfig, models: Models) -> None:
    """Raise InvalidValueError for a setting that the models do not have.

    transformers' modelling code runs without quantization, adapters or draft heads.
    """
    if models.target.transformers is not None:
        require_plan("tensor_parallel_size", models.target, config.tensor_parallel_size)
        _require("quantization", config.quantization, "none")
        _require("hf_overrides", config.hf_overrides, None)
        _require("enable_lora", config.enable_lora, False)
        if config.head is not None:
            limit = f"a method without a draft head: {_REASON}"
            raise InvalidValueError("speculative_config.method", config.head.name, limit)
        if config.kernels == "native":
            raise InvalidValueError("kernels", config.kernels, f"auto or torch: {_REASON}")
    if models.target.recurrent is not None:
        _check_hybrid(config, models.target.recurrent)
    if models.target.varied is not None:
        _check_varied(config)
    fault = native_fault(models.target, config.max_model_len)
    if fault is not None and config.device == "cpu" and config.kernels in ("native", "triton"):
        limit = f"auto or torch: {fault} have no native kernel"
        raise InvalidValueError("kernels", config.kernels, limit)
    if models.draft is not None and models.draft.recurrent is not None:
        _check_hybrid_draft(config, models.draft.recurrent)
    _require_stored_quantization(config, models.target)
    if config.enable_expert_parallel:
        require_experts(models.target, config.tensor_parallel_size)
    drafting = config.draft_model
    if drafting is not None and models.draft is not None and models.draft.transformers is not None:
        field = "speculative_config.draft_tensor_parallel_size"
        require_plan(field, models.draft, drafting.draft_tensor_parallel_size)
        _require("speculative_config.quantization", drafting.quantization, None)


def _check_hybrid(config: LLMConfig, recurrent: Recurrent) -> None:
    """Raise InvalidValueError for a setting that a model with recurrent layers does not have."""
    _require_kernels(config, recurrent)
    if _has_kernels_of_gpus(config):
        _require_plain_rows(config)
    if config.head is not None and config.head.has_layers_of_model:
        limit = f"{DraftModelConfig.name}: beside recurrent layers a draft model has its own ranks"
        raise InvalidValueError("speculative_config.method", config.head.name, limit)
    recurrent.units(0, config.tensor_parallel_size)  # raises for more ranks than units


def _check_hybrid_draft(config: LLMConfig, recurrent: Recurrent) -> None:
    """Raise InvalidValueError for a setting that a draft model with recurrent layers lacks."""
    _require_kernels(config, recurrent)
    drafting, count = config.draft_model, recurrent.kind.num_units
    assert drafting is not None, "a draft model that is not configured"
    if drafting.parallel_drafting:
        limit = "false: the state after a mask token is of no use"
        raise InvalidValueError("speculative_config.parallel_drafting", True, limit)
    if drafting.async_drafting not in ("auto", "off"):
        limit = "auto or off: a state has no branches"
        raise InvalidValueError("speculative_config.async_drafting", drafting.async_drafting, limit)
    if (size := drafting.draft_tensor_parallel_size) > count:
        limit = f"at most {count}, the units of a recurrent layer"
        raise InvalidValueError("speculative_config.draft_tensor_parallel_size", size, limit)


def _require_plain_rows(config: LLMConfig) -> None:
    """Raise InvalidValueError for what recurrent layers on a GPU do not run."""
    if config.enable_lora:
        limit = "false: recurrent layers have adapters with native or torch kernels on a CPU alone"
        raise InvalidValueError("enable_lora", True, limit)
    speculation = config.speculative_config
    if speculation is not None and (size := speculation.num_draft_tree_tokens):
        limit = "0: recurrent layers verify trees with native or torch kernels on a CPU alone"
        raise InvalidValueError("speculative_config.num_draft_tree_tokens", size, limit)


def _has_kernels_of_gpus(config: LLMConfig) -> bool:
    return config.device != "cpu" or config.kernels == "triton"


def _require_kernels(config: LLMConfig, recurrent: Recurrent) -> None:
    if config.device == "cpu":
        kernels_of_hybrids(config.kernels, recurrent)  # raises for kernels that they do not have


def draft_adapter_limits(config: LLMConfig, draft: ModelConfig) -> AdapterLimits | None:
    """Return the limits of a draft model's adapters; None where it can load none."""
    has_adapters = draft.transformers is None and draft.varied is None
    has_adapters &= draft.recurrent is None or not _has_kernels_of_gpus(config)
    return config.adapter_limits if has_adapters else None


def draft_adapter_fault(config: LLMConfig, draft: ModelConfig | None) -> str:
    """Return why no counterpart of an adapter can be loaded; empty where the drafter takes some.

    draft: the draft model, if there is one: it takes them, also beside a head.
    """
    if draft is not None:
        takes_some = draft_adapter_limits(config, draft) is not None
        return "" if takes_some else "the draft model takes no adapters; see docs/lora.md"
    if config.head is None:
        return "no draft model or head is configured, which could load it"
    on_cpu = config.device == "cpu"
    return "" if on_cpu else "draft heads take adapters on a CPU alone; see docs/lora.md"


def require_draft_adapters(draft_path: str, fault: str) -> None:
    """Raise InvalidValueError for a counterpart, if there is a `draft_adapter_fault`."""
    if draft_path and fault:
        raise InvalidValueError("draft_path", draft_path, f"left out: {fault}")


def _check_varied(config: LLMConfig) -> None:
    """Raise InvalidValueError for a setting that layers of different shapes do not have."""
    reason = "layers of different shapes run by torch on a CPU alone"
    if config.device != "cpu":
        raise InvalidValueError("device", config.device, f"cpu: {reason}")
    if config.enable_lora:
        limit = "false: no adapter updates the projections of layers of different shapes"
        raise InvalidValueError("enable_lora", True, limit)


def _require_stored_quantization(config: LLMConfig, model: ModelConfig) -> None:
    """Raise InvalidValueError for the name of a format that the model's files do not have."""
    named, found = config.quantization, model.stored_quantization
    if named not in CHECKPOINT_QUANTIZATIONS or named in found:
        return
    state = f"has weights quantized by {found[0]}" if found else "has no quantized weights"
    limit = f"none, int8, w8a8 or int4: the model {state}; a format of files is detected"
    raise InvalidValueError("quantization", named, limit)


def require_experts(model: ModelConfig, tensor_parallel_size: int) -> None:
    """Raise InvalidValueError unless each rank can have whole experts of a model."""
    if model.transformers is not None and not model.transformers.expert_fault:
        return
    if model.experts is None:
        fault = model.transformers and model.transformers.expert_fault
        limit = f"false: {fault or 'the model has no experts'}"
        raise InvalidValueError("enable_expert_parallel", True, limit)
    if tensor_parallel_size > model.experts.count:
        limit = f"at most {model.experts.count}, the experts of the model, to divide it by them"
        raise InvalidValueError("tensor_parallel_size", tensor_parallel_size, limit)


def require_plan(field: str, model: ModelConfig, num_ranks: int) -> None:
    """Raise InvalidValueError unless ranks can share a model by the plan of transformers."""
    if model.transformers is None or num_ranks == 1:
        return
    if model.transformers.parallel_fault:
        raise InvalidValueError(field, num_ranks, f"1: {model.transformers.parallel_fault}")
    for count, name in ((model.num_heads, "heads"), (model.num_kv_heads, "KV heads")):
        if count % num_ranks:
            limit = f"a divisor of {count}, the {name} of the model: {_REASON}"
            raise InvalidValueError(field, num_ranks, limit)


def _require(field: str, value: object, only: object) -> None:
    if value != only:
        raise InvalidValueError(field, value, f"{str(only).lower()}: {_REASON}")
