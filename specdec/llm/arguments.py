"""Reads the arguments of `LLM` and `AsyncLLM`, with vLLM's names where it has them.

No argument is ignored silently. An argument of vLLM is applied, or holds in any case, or is refused
with what to write instead.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypedDict, cast

from specdec.config.fields import refuse_unknown
from specdec.config.llm import LLMConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.config.speculative_keys import AUTO, SPECULATION_KEYS, read_speculation
from specdec.config.vllm_compat import in_our_words
from specdec.types.errors import InvalidValueError
from specdec.types.sampling.sampling_params import SEED_LIMIT

logger = logging.getLogger(__name__)

_MAX_QUEUE_LEN = 1_000_000
"""Queue limit: offline inference queues large batches that a service would refuse."""


class LLMArguments(TypedDict, total=False):
    """Keyword arguments of `LLM` and `AsyncLLM`; see docs/python.md."""

    tensor_parallel_size: int
    dtype: Any
    quantization: str | None
    max_model_len: int | None
    gpu_memory_utilization: float
    speculative_config: Mapping[str, Any] | SpeculativeConfig | str | None
    seed: int | None
    disable_log_stats: bool
    metric_prefix: str | None
    distributed_executor_backend: Literal["ray"] | None
    served_model_name: str | None
    revision: str | None
    device: str
    kernels: str
    model_impl: str
    hf_overrides: Mapping[str, Any] | str | None
    enable_expert_parallel: bool
    generation_config: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_tokens: int | None
    max_queue_len: int
    block_size: int
    enable_prefix_caching: bool
    stream_interval: int
    async_scheduling: bool
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int | None
    kv_cache_dtype: str
    kv_cache_memory_bytes: int | None
    kv_cache_memory_gib: float | None
    tokenizer: str | None
    trust_remote_code: bool
    enforce_eager: bool
    deterministic: bool
    disable_custom_all_reduce: bool
    compare_ranks: bool


@dataclass(frozen=True)
class Arguments:
    """The validated arguments.

    executor: name in the entry point group `specdec.executors`; None runs the models in this
    process. model_name: label of metrics. metric_prefix: as in `specdec.llm.metrics.metrics_of`.
    """

    config: LLMConfig
    model_name: str
    seed: int | None
    metric_prefix: str | None
    logs_stats: bool
    executor: str | None


_OWN = (
    *("seed", "metric_prefix", "disable_log_stats", "distributed_executor_backend"),
    *("served_model_name", "tokenizer", "revision", "kv_cache_memory_bytes"),
)
"""Arguments in addition to the fields of LLMConfig."""


def read_arguments(model: str | PathLike[str], given: Mapping[str, Any]) -> Arguments:
    """Validate arguments. Raises InvalidValueError; for an unknown name with the nearest one."""
    values, source = _without_paths(given), _without_paths(model)
    seed = _taken(values, "seed", 0, _is_seed, "None, or a whole number from 0 to 2^63 - 1")
    prefix = _taken(
        values, "metric_prefix", None, lambda v: isinstance(v, str | None), "a string, or None"
    )
    is_silent = _taken(
        values, "disable_log_stats", True, lambda v: type(v) is bool, "true or false"
    )
    name = values.pop("served_model_name", None) or source
    backend = _taken(
        values, "distributed_executor_backend", None, lambda v: v in (None, "ray"), _BACKENDS
    )
    config = _config(_located(source, values), _in_our_words(source, values))
    return Arguments(config, str(name), seed, prefix, not is_silent, _executor(config, backend))


def _without_paths(value: Any) -> Any:
    """Replace each path, also in mappings, by its absolute name: a relative one may be an alias."""
    if isinstance(value, PathLike):
        # Path.expanduser raises for an unknown user.
        return str(Path(os.path.expanduser(os.fsdecode(value))).absolute())  # noqa: PTH111
    if isinstance(value, Mapping):
        return {key: _without_paths(each) for key, each in value.items()}
    return value


_BACKENDS = "ray, or None for ray with several ranks and this process with one"


def _is_seed(value: object) -> bool:
    return value is None or (type(value) is int and 0 <= value < SEED_LIMIT)


def _taken(
    values: dict[str, Any], name: str, default: Any, accepts: Callable[[object], bool], limit: str
) -> Any:
    """Remove an argument and return its value. Raises InvalidValueError."""
    value = values.pop(name, default)
    if not accepts(value):
        raise InvalidValueError(name, value, limit)
    return value


def _executor(config: LLMConfig, backend: str | None) -> str | None:
    """Return the executor: several ranks need Ray; one rank runs in this process by default."""
    sizes = [config.tensor_parallel_size]
    if config.draft_model is not None:
        sizes.append(config.draft_model.draft_tensor_parallel_size)
    return "ray" if backend == "ray" or max(sizes) > 1 else None


def _located(model: str, values: dict[str, Any]) -> str:
    """Return the model with its revision, and remove both arguments about it."""
    tokenizer, revision = values.pop("tokenizer", None), values.pop("revision", None)
    if tokenizer not in (None, model):
        raise InvalidValueError("tokenizer", tokenizer, "left out: it comes with the model")
    return model if revision is None else f"{model}@{revision}"


def _in_our_words(model: str, values: dict[str, Any]) -> dict[str, Any]:
    """Translate vLLM's names as for a service; None for a deprecated argument is ignored."""
    older = values.keys() & SPECULATION_KEYS.keys()
    values = {name: each for name, each in values.items() if name not in older or each is not None}
    if deprecated := ", ".join(sorted(older & values.keys())):
        logger.warning("%s: write speculative_config={...} instead", deprecated)
    if "dtype" in values:
        values["dtype"] = str(values["dtype"]).removeprefix("torch.")  # which may be its own object
    if values.get("quantization") is None:
        values.pop("quantization", None)
    if "kv_cache_memory_bytes" in values:
        values["kv_cache_memory_gib"] = _kv_cache_memory_gib(values)
    return in_our_words(values, model=model, device=LLMConfig.device)


def _kv_cache_memory_gib(values: dict[str, Any]) -> float | None:
    name = "kv_cache_memory_bytes"
    num_bytes, gib = values.pop(name), values.get("kv_cache_memory_gib")
    if num_bytes is None:
        return cast("float | None", gib)
    if type(num_bytes) is not int or num_bytes <= 0:
        raise InvalidValueError(name, num_bytes, "None, or a whole number above 0")
    if gib is not None:
        raise InvalidValueError(name, num_bytes, "left out where kv_cache_memory_gib is given")
    return num_bytes / 2**30


def _config(model: str, values: dict[str, Any]) -> LLMConfig:
    known = [each.name for each in fields(LLMConfig)]
    refuse_unknown("argument", values, [*known, *_OWN])
    values = {"max_queue_len": _MAX_QUEUE_LEN, **values, "model": model}
    speculation = values.get("speculative_config", AUTO)
    if not isinstance(speculation, SpeculativeConfig):
        values["speculative_config"] = read_speculation(speculation)
    return LLMConfig(**values)
