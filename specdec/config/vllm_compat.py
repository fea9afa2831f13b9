"""Reads settings that are told in vLLM's words, or in those of old texts about it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from specdec.config.fields import TEXT, shown_value
from specdec.config.hardware import resolved_device
from specdec.config.speculative_keys import AUTO, SPECULATION_KEYS, as_mapping, default_speculation
from specdec.types.errors import InvalidValueError

VALUES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "dtype": {"half": "float16", "float": "float32"},
        "generation_config": {"vllm": "none"},
        "spec_decoding_acceptance_method": {
            "rejection_sampler": "rejection",
            "typical_acceptance_sampler": "typical",
        },
    }
)
"""Values under another name, by setting."""

_BY_CHECKPOINT = "left out: a checkpoint that is quantized says so itself"

REFUSED_VALUES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "quantization": dict.fromkeys(
            ("awq", "awq_marlin", "gptq", "gptq_marlin", "fp8"), _BY_CHECKPOINT
        ),
    }
)
"""Values that somebody who knows vLLM may give, and what to give instead."""


class Always(NamedTuple):
    """A setting of vLLM that can have one value here. reason: why, or what is done.

    synonyms: values that ask for the same.
    """

    value: bool | int | str
    reason: str
    synonyms: tuple[str, ...] = ()


ALWAYS: Mapping[str, Always] = MappingProxyType(
    {
        "cpu_offload_gb": Always(0, "a model is held whole where it runs"),
        "data_parallel_size": Always(1, "a service has num_replicas instead"),
        "enable_chunked_prefill": Always(True, "long prompts are computed in chunks"),
        "enforce_eager": Always(True, "no CUDA graphs are captured"),
        "kv_cache_dtype": Always("auto", "the KV cache is held in dtype"),
        "load_format": Always("auto", "what a model's files are is seen by them", ("safetensors",)),
        "pipeline_parallel_size": Always(1, "tensor_parallel_size alone divides a model"),
        "preemption_mode": Always("recompute", "what is preempted is computed again"),
        "runner": Always("generate", "models generate text", ("auto",)),
        "scheduling_policy": Always("priority", "requests go by their priority, then by arrival"),
        "skip_tokenizer_init": Always(False, "text is told; prompts may be token ids anyway"),
        "task": Always("generate", "models generate text", ("auto",)),
        "tokenizer_mode": Always("auto", "a model's files say how to tokenize"),
        "trust_remote_code": Always(False, "no code that comes with a model is run"),
        "use_v2_block_manager": Always(True, "there is one block manager"),
    }
)
"""Settings that may be given, with the one value that is so anyway."""

_ONE_ADAPTER = "left out: adapters are not loaded; merge one into its model"
_GRAPHS = "left out: no CUDA graphs are captured"
_TEXT_ONLY = "left out: the models read text only"

NOT_HERE: Mapping[str, str] = MappingProxyType(
    {
        "attention_backend": "given as kernels",
        "calculate_kv_scales": "left out: the KV cache is held in dtype",
        "chat_template": "left out: the model's own template is used",
        "code_revision": "left out: no code that comes with a model is run",
        "compilation_config": _GRAPHS,
        "cuda_graph_sizes": _GRAPHS,
        "disable_custom_all_reduce": "left out: how ranks reduce follows from where they are",
        "disable_sliding_window": "left out: a model's windows are part of it",
        "download_dir": "given as $HF_HOME for models of the Hub, else $SPECDEC_CACHE_DIR",
        "draft_model": "given as model in speculative_config",
        "enable_expert_parallel": "left out: no models with experts are supported",
        "enable_lora": _ONE_ADAPTER,
        "guided_decoding_backend": "left out: there is one, llguidance",
        "hf_config_path": "left out: a model and its config.json are in one place",
        "hf_overrides": "left out: change the model's config.json",
        "hf_token": "given as $HF_TOKEN",
        "kv_transfer_config": "left out: KV is not passed between instances",
        "limit_mm_per_prompt": _TEXT_ONLY,
        "lora_modules": _ONE_ADAPTER,
        "max_cpu_loras": _ONE_ADAPTER,
        "max_logprobs": "left out: it is 20",
        "max_lora_rank": _ONE_ADAPTER,
        "max_loras": _ONE_ADAPTER,
        "max_num_partial_prefills": "given as max_prefill_tokens",
        "max_parallel_loading_workers": "left out: ranks load at once, each its own part",
        "max_seq_len_to_capture": _GRAPHS,
        "mm_processor_kwargs": _TEXT_ONLY,
        "model_impl": "given as kernels",
        "num_gpu_blocks_override": "given as kv_cache_memory_gib",
        "num_lookahead_slots": "left out: drafts have room as they need it",
        "num_scheduler_steps": "left out: each step is scheduled",
        "optimization_level": _GRAPHS,
        "override_generation_config": "left out: change the model's generation_config.json",
        "quantization_param_path": "left out: the KV cache is held in dtype",
        "scheduler_delay_factor": "left out: a request begins as soon as there is room",
        "speculative_decoding": "given as speculative_config; none turns it off",
        "speculative_disable_mqa_scorer": "left out: drafts are scored in one pass",
        "speculative_ratio": "given as num_speculative_tokens, how many tokens to draft",
        "speculative_sampling": "given as speculative_config; none turns it off",
        "swap_space": "left out: what is preempted is computed again, not swapped",
        "tokenizer_revision": "left out: the tokenizer comes with the model",
    }
)
"""Settings that have no meaning here, or one that needs a thought: what they must be."""


@dataclass(frozen=True)
class Words:
    """The tables of one surface: those above, with what only it has. renamed: to our names."""

    renamed: Mapping[str, str]
    always: Mapping[str, Always]
    not_here: Mapping[str, str]


IN_PROCESS = Words({}, ALWAYS, NOT_HERE)
"""Of `LLM` and `AsyncLLM`; what they take beyond a service is in `specdec.llm.arguments`."""


_DECIDES_METHOD = frozenset({"method", "model"})
_LOOKUP_KEYS = frozenset({"prompt_lookup_min", "prompt_lookup_max"})

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Told:
    """What one source says. speculation: keys of speculative_config that it names by themselves."""

    settings: Mapping[str, Any]
    speculation: Mapping[str, Any]


def in_our_words(
    words: Words, *sources: Mapping[Any, Any], model: str = "", device: str = "cpu"
) -> dict[str, Any]:
    """Settings under our names; a later source wins, of speculation key by key.

    words: of the surface. model, device: what is served unless a source says so, which decides how
    to draft where only details of it are told. Raises InvalidValueError for what is told twice in
    one source, and for what there is not here, with what to write instead.
    """
    told = [_read(words, source) for source in sources]
    settings: dict[str, Any] = {}
    for each in told:
        settings |= each.settings
    if any(each.speculation for each in told):
        served = {"model": model, "device": device, "quantization": "none"} | settings
        settings["speculative_config"] = _speculation(told, served)
    return settings


def value_in_our_words(name: str, value: Any) -> Any:
    """A value of the setting under our name for it. Raises InvalidValueError."""
    if not isinstance(value, str):
        return value
    if (limit := REFUSED_VALUES.get(name, {}).get(value)) is not None:
        raise InvalidValueError(name, value, limit)
    return VALUES.get(name, {}).get(value, value)


def _read(words: Words, source: Mapping[Any, Any]) -> _Told:
    settings: dict[str, Any] = {}
    speculation: dict[str, Any] = {}
    for key, value in source.items():
        name = key.replace("-", "_") if isinstance(key, str) else key
        if name in words.not_here:
            raise InvalidValueError(key, shown_value(name, value), words.not_here[name])
        if name in words.always:
            _check_always(name, value, words.always[name])
        elif name in SPECULATION_KEYS:
            _put(speculation, SPECULATION_KEYS[name], name, value)
        else:
            _put(settings, words.renamed.get(name, name), name, value)
    return _Told(settings, speculation)


def _put(values: dict[str, Any], ours: Any, name: Any, value: Any) -> None:
    if ours in values:
        raise InvalidValueError(name, value, f"left out where {ours} is given, too")
    values[ours] = value_in_our_words(name, value)


def _check_always(name: str, value: Any, always: Always) -> None:
    only, reason, synonyms = always
    is_it = value == only and isinstance(value, bool) == isinstance(only, bool)  # True equals 1
    if not is_it and value not in synonyms:
        spelled = str(only).lower() if isinstance(only, bool) else only
        raise InvalidValueError(name, value, f"{spelled}, or left out: {reason}")
    logger.warning("%s is so without being told: %s", name, reason)


def _speculation(told: list[_Told], served: Mapping[str, Any]) -> dict[str, Any] | None:
    """The last speculative_config, with the keys that are told beside it or after it."""
    base = as_mapping(AUTO)
    keys: dict[str, Any] = {}
    for each in told:
        if "speculative_config" in each.settings:
            base, keys = as_mapping(each.settings["speculative_config"]), {}
            _refuse_second(each.speculation, base)
        keys |= each.speculation
    if base is None:
        for key, value in keys.items():
            limit = "left out where speculative_config is none"
            raise InvalidValueError(f"speculative_config.{key}", value, limit)
        return None
    return {**(_default(keys, served) if base == AUTO else base), **keys}


def _refuse_second(keys: Mapping[str, Any], base: object) -> None:
    for key, value in keys.items():
        if isinstance(base, Mapping) and key in base:
            limit = "left out beside a speculative_config that has it"
            raise InvalidValueError(f"speculative_config.{key}", value, limit)


def _default(keys: Mapping[str, Any], served: Mapping[str, Any]) -> dict[str, Any]:
    """What auto stands for, as far as the keys leave that open."""
    if _DECIDES_METHOD & keys.keys():
        return {}
    if _LOOKUP_KEYS & keys.keys():
        return {"method": "ngram"}
    model, device, quantization = (served[name] for name in ("model", "device", "quantization"))
    for name in ("model", "device"):
        if not isinstance(served[name], str):
            raise InvalidValueError(name, served[name], TEXT.text)
    default = default_speculation(model, resolved_device(device), quantization)
    quantization = {"quantization": default.quantization} if default.quantization else {}
    return {"method": default.method, **quantization}
