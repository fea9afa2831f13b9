"""The arguments of `LLM` and `AsyncLLM`: vLLM's where it has them, read to what they mean here.

Nothing is swallowed. What an argument of vLLM asks for is done, or holds anyway, or is refused with
what to write instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Literal, TypedDict

from specdec.errors import InvalidValueError
from specdec.llm_config import LLMConfig
from specdec.metric_spec import PREFIX
from specdec.sampling_params import SEED_LIMIT
from specdec.settings import refuse_unknown, shown_value
from specdec.speculative_config import SpeculativeConfig
from specdec.speculative_keys import AUTO, read_speculation

logger = logging.getLogger(__name__)

_MAX_QUEUE_LEN = 1_000_000
"""A program that asks for many answers is to wait for them, where a service would refuse."""


class LLMArguments(TypedDict, total=False):
    """What may be given beside the model; docs/python.md says what each means."""

    tensor_parallel_size: int
    dtype: Any
    quantization: str | None
    max_model_len: int | None
    gpu_memory_utilization: float
    speculative_config: Mapping[str, Any] | SpeculativeConfig | str | None
    seed: int | None
    disable_log_stats: bool
    metric_prefix: str
    distributed_executor_backend: Literal["ray"] | None
    served_model_name: str | None
    revision: str | None
    device: str
    kernels: str
    generation_config: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_tokens: int | None
    max_queue_len: int
    block_size: int
    enable_prefix_caching: bool
    stream_interval: int
    kv_cache_memory_bytes: int | None
    kv_cache_memory_gib: float | None
    tokenizer: str | None
    trust_remote_code: bool
    enforce_eager: bool


@dataclass(frozen=True)
class Arguments:
    """What the arguments come to.

    executor: name of what runs the models, in the entry point group `specdec.executors`; None runs
    them in this process. model_name: as metrics tell it.
    """

    config: LLMConfig
    model_name: str
    seed: int | None
    metric_prefix: str
    logs_stats: bool
    executor: str | None


_DTYPES: Mapping[str, str] = MappingProxyType(
    {"auto": "float32", "half": "float16", "float": "float32"}
)
"""vLLM's other words. auto is float32, in which speculation changes no token."""

_OLDER: frozenset[str] = frozenset(
    {
        "speculative_model",
        "speculative_model_quantization",
        "speculative_draft_tensor_parallel_size",
        "speculative_max_model_len",
        "speculative_disable_by_batch_size",
        "num_speculative_tokens",
        "ngram_prompt_lookup_max",
        "ngram_prompt_lookup_min",
    }
)
"""Arguments of earlier versions of vLLM that are keys of speculative_config now."""

_NOT_OFFERED: Mapping[str, str] = MappingProxyType(
    {
        "speculative_ratio": "left out: how many tokens are drafted a step is "
        "speculative_config={'num_speculative_tokens': ...}",
        "speculative_sampling": "left out: speculative_config={...} drafts, None does not",
        "speculative_decoding": "left out: speculative_config={...} drafts, None does not",
        "draft_model": "left out: it is speculative_config={'model': ...}",
        "tokenizer_revision": "left out: the tokenizer comes with the model, whose revision rules",
        "download_dir": "left out: $HF_HOME says where models of the Hub are kept",
        "hf_token": "left out: $HF_TOKEN is what the Hub is asked with",
        "chat_template": "left out: the model's own is used",
        "swap_space": "left out: a preempted request is computed again",
        "cuda_graph_sizes": "left out: no graphs are captured",
        "compilation_config": "left out: nothing is compiled by torch",
        "enable_lora": "left out: adapters are not loaded",
    }
)

_ONLY_VALUES: Mapping[str, tuple[tuple[object, ...], str]] = MappingProxyType(
    {
        "trust_remote_code": ((False,), "false or left out: a model's own code is never run"),
        "enforce_eager": ((True,), "true or left out: no graphs are captured"),
        "enable_chunked_prefill": ((True,), "true or left out: prompts are computed in chunks"),
        "use_v2_block_manager": ((True,), "left out: there is one block manager"),
        "skip_tokenizer_init": ((False,), "false or left out: text is always told"),
        "tokenizer_mode": (("auto",), "auto or left out"),
        "task": (("auto", "generate"), "generate or left out"),
        "runner": (("auto", "generate"), "generate or left out"),
        "load_format": (("auto", "safetensors"), "safetensors or left out"),
        "kv_cache_dtype": (("auto",), "auto or left out: KV has the model's dtype"),
        "pipeline_parallel_size": ((1,), "1 or left out; tensor_parallel_size divides a model"),
        "data_parallel_size": ((1,), "1 or left out; `specdec serve` has replicas"),
        "cpu_offload_gb": ((0,), "0 or left out: weights stay where they are used"),
    }
)
"""Arguments of vLLM that can have few values here, which say what holds anyway."""

_OWN = ("seed", "metric_prefix", "disable_log_stats", "distributed_executor_backend")


def read_arguments(model: str, given: Mapping[str, Any]) -> Arguments:
    """Raises InvalidValueError, also for an unknown name, with the nearest known one."""
    values = _in_todays_words(dict(given))
    _take_what_holds_anyway(model, values)
    seed = _taken(values, "seed", 0, _is_seed, "None, or a whole number from 0 to 2^63 - 1")
    prefix = _taken(values, "metric_prefix", PREFIX, _is_text, "a text")
    is_silent = _taken(values, "disable_log_stats", True, _is_bool, "true or false")
    name = values.pop("served_model_name", None) or model
    backend = _taken(values, "distributed_executor_backend", None, _is_backend, _BACKENDS)
    config = _config(model, values)
    return Arguments(config, str(name), seed, prefix, not is_silent, _executor(config, backend))


def _is_seed(value: object) -> bool:
    return value is None or (type(value) is int and 0 <= value < SEED_LIMIT)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_bool(value: object) -> bool:
    return type(value) is bool


def _is_backend(value: object) -> bool:
    return value in (None, "ray")


_BACKENDS = "ray, or None, which takes ray for several ranks and this process for one"


def _taken(
    values: dict[str, Any], name: str, default: Any, accepts: Callable[[object], bool], limit: str
) -> Any:
    value = values.pop(name, default)
    if not accepts(value):
        raise InvalidValueError(name, value, limit)
    return value


def _executor(config: LLMConfig, backend: str | None) -> str | None:
    """What divides a model over several ranks; one rank runs in this process unless asked."""
    sizes = [config.tensor_parallel_size]
    if config.speculative_config is not None:
        sizes.append(config.speculative_config.draft_tensor_parallel_size)
    return "ray" if backend == "ray" or max(sizes) > 1 else None


def _in_todays_words(values: dict[str, Any]) -> dict[str, Any]:
    """Older arguments become keys of speculative_config; what has no meaning here is refused."""
    for name in values.keys() & _NOT_OFFERED.keys():
        raise InvalidValueError(name, shown_value(name, values[name]), _NOT_OFFERED[name])
    older = {name: values.pop(name) for name in sorted(values.keys() & _OLDER)}
    older = {name: value for name, value in older.items() if value is not None}
    if older and "speculative_config" in values:
        name, value = next(iter(older.items()))
        raise InvalidValueError(name, value, "left out where speculative_config is given")
    if older:
        logger.warning("%s: write speculative_config={...} instead", ", ".join(older))
        values["speculative_config"] = older
    return values


def _take_what_holds_anyway(model: str, values: dict[str, Any]) -> None:
    for name, (accepted, limit) in _ONLY_VALUES.items():
        value = values.pop(name, accepted[0])
        if value not in accepted:
            raise InvalidValueError(name, value, limit)
    tokenizer = values.pop("tokenizer", None)
    if tokenizer not in (None, model):
        raise InvalidValueError("tokenizer", tokenizer, "left out: it comes with the model")


def _config(model: str, values: dict[str, Any]) -> LLMConfig:
    known = [each.name for each in fields(LLMConfig)]
    refuse_unknown("argument", values, [*known, *_OWN, "revision", "kv_cache_memory_bytes"])
    values = {"max_queue_len": _MAX_QUEUE_LEN, **values, "model": model}
    if (revision := values.pop("revision", None)) is not None:
        values["model"] = f"{model}@{revision}"
    if (num_bytes := values.pop("kv_cache_memory_bytes", None)) is not None:
        values["kv_cache_memory_gib"] = num_bytes / 2**30
    if "dtype" in values:
        values["dtype"] = _dtype(values["dtype"])
    if values.get("quantization") is None:
        values.pop("quantization", None)
    if values.get("generation_config") == "vllm":  # vLLM's word for its own, neutral values
        values["generation_config"] = "none"
    speculation = values.get("speculative_config", AUTO)
    if not isinstance(speculation, SpeculativeConfig):
        values["speculative_config"] = read_speculation(speculation)
    return LLMConfig(**values)


def _dtype(value: object) -> str:
    """A name, or torch's own object."""
    name = str(value).removeprefix("torch.")
    return _DTYPES.get(name, name)
