"""Settings that a model without a decoder of this project does not have."""

from __future__ import annotations

from specdec.config.llm import LLMConfig
from specdec.engine.model_resolution import Models
from specdec.types.errors import InvalidValueError

_REASON = "the model runs by transformers' code"


def check_model_limits(config: LLMConfig, models: Models) -> None:
    """Raise InvalidValueError for a setting that needs specdec's own decoder, where it is missing.

    transformers' modelling code runs on one rank, without quantization, adapters or draft heads.
    """
    if models.target.transformers is not None:
        _require("tensor_parallel_size", config.tensor_parallel_size, 1)
        _require("quantization", config.quantization, "none")
        _require("enable_lora", config.enable_lora, False)
        if config.head is not None:
            limit = f"a method without a draft head: {_REASON}"
            raise InvalidValueError("speculative_config.method", config.head.name, limit)
        if config.kernels == "native":
            raise InvalidValueError("kernels", config.kernels, f"auto or torch: {_REASON}")
    if models.target.latent is not None and config.enable_lora:
        limit = "false: the model has latent attention, whose projections take no adapters"
        raise InvalidValueError("enable_lora", True, limit)
    drafting = config.draft_model
    if drafting is not None and models.draft is not None and models.draft.transformers is not None:
        field = "speculative_config.draft_tensor_parallel_size"
        _require(field, drafting.draft_tensor_parallel_size, 1)
        _require("speculative_config.quantization", drafting.quantization, None)


def _require(field: str, value: object, only: object) -> None:
    if value != only:
        raise InvalidValueError(field, value, f"{str(only).lower()}: {_REASON}")
