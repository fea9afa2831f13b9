"""Fields of the APIs that are not supported, and their values that count as left out.

Clients and routers send fields with their default. An unsupported field is rejected only with a
value that the service would have to act on.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from specdec.types.sampling.vllm_sampling import requests_nothing

_NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "beam_width": (1,),
        "best_of": (1,),
        "chat_template_content_format": ("auto",),
        "disable_any_whitespace": (True,),
        "disable_fallback": (True,),
        "fallbacks": ("default",),
        "function_call": ("none", "auto"),
        "guided_decoding_backend": ("auto", "guidance"),
        "inference_geo": ("global",),
        "length_penalty": (1, 1.0),
        "log_metrics": (True,),
        "modalities": (["text"],),
        "routed_experts_start_len": (0,),
        "separate_reasoning": (True,),
        "spaces_between_special_tokens": (True,),
        "stream_options": (
            {"include_usage": True},
            {"include_obfuscation": False},
            {"include_usage": True, "include_obfuscation": False},
        ),
        "stream_reasoning": (True,),
        "truncation_side": ("left",),
    }
)
"""Values that request nothing, or what a response has in any case.

In every field an empty value (false, "", [], {}) is another.
"""
_OPTIONS_OF_REQUESTS = frozenset({"web_search_options"})
"""Fields whose empty object requests something, with its default options."""

_NO_DISAGGREGATION = "left out: prompts and answers are computed by one replica"
_NOT_RETURNED = "left out: the model's inner state is not returned"
_NO_CODE = "left out: requests cannot contain code"
_ALWAYS_LOGGED = "left out: log and metrics have no texts, and every request"

ENGINE_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "bootstrap_host": _NO_DISAGGREGATION,
        "bootstrap_port": _NO_DISAGGREGATION,
        "bootstrap_room": _NO_DISAGGREGATION,
        "custom_labels": "left out: metrics have the labels of the service",
        "custom_logit_processor": _NO_CODE,
        "custom_params": _NO_CODE,
        "data_parallel_rank": _NO_DISAGGREGATION,
        "disagg_prefill_dp_rank": _NO_DISAGGREGATION,
        "extra_key": "left out: use cache_salt",
        "kv_transfer_params": "left out: KV transfer is not supported",
        "log_metrics": _ALWAYS_LOGGED,
        "no_logs": _ALWAYS_LOGGED,
        "repetition_detection": "left out: repetitions do not end a text",
        "require_reasoning": "left out: whether the model reasons is its template's variable",
        "return_bytes": "left out: texts are returned",
        "return_cached_tokens_details": "left out: usage has cached_tokens",
        "return_entropy": _NOT_RETURNED,
        "return_hidden_states": _NOT_RETURNED,
        "return_indexer_topk": _NOT_RETURNED,
        "return_routed_experts": _NOT_RETURNED,
        "routed_dp_rank": _NO_DISAGGREGATION,
        "routed_experts_start_len": _NOT_RETURNED,
        "session_params": "left out: the prefix cache keeps the state of a conversation",
        "stop_regex": "left out: use stop",
    }
)
"""Unsupported fields of vLLM and SGLang that any of their endpoints may have."""


def is_neutral(name: str, value: Any) -> bool:
    """Return whether a value of an unsupported field requests nothing; 1 is not true."""
    is_request = value == {} and name in _OPTIONS_OF_REQUESTS
    return not is_request and requests_nothing(value, _NEUTRAL.get(name, ()))
