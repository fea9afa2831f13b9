"""Settings of an LLMConfig that exclude each other."""

from __future__ import annotations

from typing import Protocol

from specdec.config.quantization import QuantizationMethod
from specdec.types.errors import InvalidValueError


class Drafter(Protocol):
    """The part of a draft model's or head's configuration that is checked."""

    @property
    def quantization(self) -> str | None: ...


class Settings(Protocol):
    """The settings of an LLMConfig that are checked; see there."""

    @property
    def device(self) -> str: ...

    @property
    def kernels(self) -> str: ...

    @property
    def quantization(self) -> str: ...

    @property
    def kv_cache_dtype(self) -> str: ...

    @property
    def deterministic(self) -> bool: ...

    @property
    def enable_lora(self) -> bool: ...

    @property
    def tensor_parallel_size(self) -> int: ...

    @property
    def max_num_seqs(self) -> int: ...

    @property
    def max_num_batched_tokens(self) -> int: ...

    @property
    def shares_gpu(self) -> bool: ...

    @property
    def draft_model(self) -> Drafter | None: ...

    @property
    def head(self) -> Drafter | None: ...


def check_together(config: Settings) -> None:
    """Raise InvalidValueError for the first setting that another one excludes."""
    if config.device != "cpu":
        limit = f"left out, int8 or int4 where device is {config.device}: it runs on a CPU"
        _refuse_quantization(config, limit, "w8a8")
        if config.kernels == "native":
            limit = f"auto, triton or torch where device is {config.device}: they run on a CPU"
            raise InvalidValueError("kernels", config.kernels, limit)
    if config.shares_gpu and (config.device == "cpu" or config.tensor_parallel_size > 1):
        limit = "left out, except on a GPU with one rank of the target"
        raise InvalidValueError("speculative_config.share_gpu", True, limit)
    _check_deterministic(config)
    _check_kv_cache(config)
    if config.kernels in ("torch", "triton"):
        limit = f"left out or int8 where kernels is {config.kernels}: w8a8 needs native kernels"
        _refuse_quantization(config, limit, "w8a8")
    if config.device == "cpu" and config.kernels != "triton":
        limit = "left out, int8 or w8a8 on a CPU: int4 has kernels for GPUs"
        _refuse_quantization(config, limit, "int4")
    elif config.kernels == "torch" and config.device != "cpu":
        limit = "left out on a GPU with torch's kernels: Triton's multiply by quantized weights"
        _refuse_quantization(config, limit, "int8", "int4")
    if config.max_num_batched_tokens < config.max_num_seqs:
        limit = f"at least max_num_seqs ({config.max_num_seqs}), so that all can decode in a step"
        raise InvalidValueError("max_num_batched_tokens", config.max_num_batched_tokens, limit)


def _check_deterministic(config: Settings) -> None:
    if not config.deterministic:
        return
    limit = None
    if config.kernels == "torch":
        limit = "False where kernels is torch, whose sums depend on the batch"
    elif config.device != "cpu" and config.enable_lora:
        limit = "False with adapters on a GPU, whose products depend on the batch"
    if limit is not None:
        raise InvalidValueError("deterministic", True, limit)


def _check_kv_cache(config: Settings) -> None:
    is_native = config.device == "cpu" and config.kernels in ("auto", "native")
    if config.kv_cache_dtype != "auto" and is_native:
        limit = "auto on a CPU, except where kernels is torch: the native kernels of CPUs read "
        limit += "keys and values of 16 and 32 bits"
        raise InvalidValueError("kv_cache_dtype", config.kv_cache_dtype, limit)


def _refuse_quantization(config: Settings, limit: str, *methods: QuantizationMethod) -> None:
    if config.quantization in methods:
        raise InvalidValueError("quantization", config.quantization, limit)
    for drafter in (config.draft_model, config.head):
        if drafter is not None and drafter.quantization in methods:
            field = "speculative_config.quantization"
            raise InvalidValueError(field, drafter.quantization, limit)
