"""Reads settings under vLLM's names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from specdec.config.fields import TEXT
from specdec.config.hardware import resolved_device
from specdec.config.speculative_keys import AUTO, SPECULATION_KEYS, as_mapping, default_keys
from specdec.types.errors import InvalidValueError

VALUES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "dtype": {"half": "float16", "float": "float32"},
        "generation_config": {"vllm": "none"},
        "quantization": {"awq_marlin": "awq", "gptq_marlin": "gptq", "modelopt_fp4": "modelopt"},
        "model_impl": {"vllm": "specdec", "sglang": "specdec"},
        "tool_call_parser": {
            "openai": "gpt_oss",
            "gpt-oss": "gpt_oss",
            "qwen": "hermes",
            "qwen25": "hermes",
            "qwen3_xml": "qwen3_coder",
            "llama3": "llama3_json",
            "llama4_json": "llama3_json",
            "pythonic": "llama4_pythonic",
            "deepseekv3": "deepseek_v3",
            "deepseekv31": "deepseek_v31",
            "glm47": "glm45",
            "granite4": "hermes",
            "minimax-m2": "minimax_m2",
        },
        "reasoning_parser": {
            "openai_gptoss": "gpt_oss",
            "gpt-oss": "gpt_oss",
            "deepseek-r1": "deepseek_r1",
            "qwen3-thinking": "deepseek_r1",
            "glm45": "qwen3",
        },
    }
)
"""Our value by vLLM's, for each setting."""


class Always(NamedTuple):
    """A setting of vLLM with one possible value here.

    reason: why there is no other value. synonyms: values with the same meaning. takes_any: whether
    every other value of its type is accepted, too, since none has an effect here.
    """

    value: bool | int | str
    reason: str
    synonyms: tuple[bool | str, ...] = ()
    takes_any: bool = False


ALWAYS: Mapping[str, Always] = MappingProxyType(
    {
        "cpu_offload_gb": Always(0, "CPU offloading of weights is not supported"),
        "data_parallel_size": Always(1, "set num_replicas instead"),
        "enable_chunked_prefill": Always(True, "long prompts are always prefilled in chunks"),
        "fully_sharded_loras": Always(False, "ranks divide one matrix of each pair"),
        "lora_dtype": Always("auto", "adapters have the data type of dtype"),
        "load_format": Always("auto", "the format is detected from the files", ("safetensors",)),
        "pipeline_parallel_size": Always(
            1, "pipeline parallelism is not supported; set tensor_parallel_size"
        ),
        "runner": Always("generate", "models generate text", ("auto",)),
        "scheduling_policy": Always("priority", "requests run by priority, then by arrival"),
        "skip_tokenizer_init": Always(False, "output has text; prompts may be token ids anyway"),
        "tokenizer_mode": Always("auto", "the tokenizer is detected from the files"),
        "trust_remote_code": Always(False, "remote code of a model is never executed"),
    }
)
"""Flags of vLLM that are accepted with the one value that applies here."""


_DECIDES_METHOD = frozenset({"method", "model"})
_LOOKUP_KEYS = frozenset({"prompt_lookup_min", "prompt_lookup_max"})
_NOT_RENAMED: Mapping[str, str] = MappingProxyType({})

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Source:
    """Settings of one source. speculation: keys of speculative_config that have their own flags."""

    settings: Mapping[str, Any]
    speculation: Mapping[str, Any]


def in_our_words(
    *sources: Mapping[Any, Any],
    renamed: Mapping[str, str] = _NOT_RENAMED,
    always: Mapping[str, Always] = ALWAYS,
    speculation_keys: Mapping[str, str] = SPECULATION_KEYS,
    model: str = "",
    device: str = "cpu",
) -> dict[str, Any]:
    """Return settings under our names; a later source wins, for speculation key by key.

    renamed: our name by the other engine's. always: the flags with one possible value.
    speculation_keys: keys of speculative_config by their flags.
    model, device: the ones to serve unless a source has others; they decide how to draft where
    only details of it are given.
    Raise InvalidValueError for a setting that is given twice in one source, and for another value
    of a flag with one possible value.
    """
    read = [_read(source, renamed, always, speculation_keys) for source in sources]
    settings: dict[str, Any] = {}
    for each in read:
        settings |= each.settings
    if any(each.speculation for each in read):
        served = {"model": model, "device": device} | settings
        settings["speculative_config"] = _speculation(read, served)
    return settings


def value_in_our_words(name: str, value: Any) -> Any:
    """Return our value for vLLM's value of the setting with our name `name`."""
    return VALUES.get(name, {}).get(value, value) if isinstance(value, str) else value


def _read(
    source: Mapping[Any, Any],
    renamed: Mapping[str, str],
    always: Mapping[str, Always],
    speculation_keys: Mapping[str, str],
) -> _Source:
    settings: dict[str, Any] = {}
    speculation: dict[str, Any] = {}
    for key, value in source.items():
        name = key.replace("-", "_") if isinstance(key, str) else key
        if name in always:
            _check_always(name, value, always[name])
        elif name in speculation_keys:
            _put(speculation, speculation_keys[name], name, value)
        else:
            _put(settings, renamed.get(name, name), name, value)
    return _Source(settings, speculation)


def _put(values: dict[str, Any], ours: Any, name: Any, value: Any) -> None:
    if ours in values:
        raise InvalidValueError(name, value, f"left out where {ours} is given, too")
    values[ours] = value_in_our_words(name, value)


def _check_always(name: str, value: Any, always: Always) -> None:
    only, reason, synonyms, takes_any = always
    is_it = value == only and isinstance(value, bool) == isinstance(only, bool)  # True equals 1
    is_accepted = is_it or value in synonyms or (takes_any and type(value) is type(only))
    if not is_accepted:
        spelled = str(only).lower() if isinstance(only, bool) else only
        raise InvalidValueError(name, value, f"{spelled}, or left out: {reason}")
    logger.warning("%s has no effect and may be left out: %s", name, reason)


def _speculation(read: list[_Source], served: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the last speculative_config, with the keys that are given beside it or after it."""
    base = as_mapping(AUTO)
    keys: dict[str, Any] = {}
    for each in read:
        if "speculative_config" in each.settings:
            base, keys = as_mapping(each.settings["speculative_config"]), {}
            _refuse_duplicates(each.speculation, base)
        keys |= each.speculation
    if base is None:
        for key, value in keys.items():
            limit = "left out where speculative_config is none"
            raise InvalidValueError(f"speculative_config.{key}", value, limit)
        return None
    return {**(_default(keys, served) if base == AUTO else base), **keys}


def _refuse_duplicates(keys: Mapping[str, Any], base: object) -> None:
    for key, value in keys.items():
        if isinstance(base, Mapping) and key in base:
            limit = "left out beside a speculative_config that has it"
            raise InvalidValueError(f"speculative_config.{key}", value, limit)


def _default(keys: Mapping[str, Any], served: Mapping[str, Any]) -> dict[str, Any]:
    """Return the meaning of auto, as far as the keys leave it open."""
    if _DECIDES_METHOD & keys.keys():
        return {}
    if _LOOKUP_KEYS & keys.keys():
        return {"method": "ngram"}
    for name in ("model", "device"):
        if not isinstance(served[name], str):
            raise InvalidValueError(name, served[name], TEXT.text)
    return default_keys(served["model"], resolved_device(served["device"]))
