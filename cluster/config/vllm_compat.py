"""vLLM's names for the settings of a service.

Names have underscores; a flag has dashes instead. Those of an engine are in
`specdec.config.vllm_compat`. Other names are refused as unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cluster.config import sglang_compat
from specdec.config import vllm_compat
from specdec.config.speculative_keys import SPECULATION_KEYS
from specdec.config.vllm_compat import Always

SAME = (
    *("model", "served_model_name", "dtype", "quantization", "device", "generation_config"),
    *(
        "tensor_parallel_size",
        "enable_expert_parallel",
        "gpu_memory_utilization",
        "block_size",
        "kv_cache_dtype",
    ),
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "stream_interval"),
    *("hf_overrides", "async_scheduling", "enforce_eager", "enable_prefix_caching"),
    "disable_custom_all_reduce",
    *("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_modules"),
    *("speculative_config", "host", "otlp_traces_endpoint", "tool_call_parser"),
    *("seed", "chat_template", "reasoning_parser"),
)
"""Settings with the same name and meaning."""

RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "port": "http_port",
        "api_server_count": "frontends",
        "ssl_certfile": "tls_cert_file",
        "ssl_keyfile": "tls_key_file",
    }
)
"""Our name by vLLM's, for settings with the same meaning."""

ALWAYS: Mapping[str, Always] = MappingProxyType(
    {
        **vllm_compat.ALWAYS,
        "disable_log_stats": Always(
            True, "no lines of statistics are logged; /metrics has them", (False,)
        ),
        "disable_uvicorn_access_log": Always(True, "there is no access log"),
        "distributed_executor_backend": Always("ray", "ranks are Ray actors"),
        "enable_auto_tool_choice": Always(True, "each request decides, by its tool_choice"),
        "enable_log_requests": Always(False, "requests are logged with --log-level info alone"),
        "enable_prompt_tokens_details": Always(True, "the usage reports cached tokens"),
        "enable_request_id_headers": Always(True, "responses have X-Request-Id"),
        "enable_ssl_refresh": Always(
            True, "new certificate files are used from the next connection on"
        ),
        "response_role": Always("assistant", "answers have this role"),
    }
)
"""Flags of vLLM that are accepted with the one value that applies here."""


ALL_RENAMED = MappingProxyType({**RENAMED, **sglang_compat.RENAMED})
ALL_ALWAYS = MappingProxyType({**ALWAYS, **sglang_compat.ALWAYS})
ALL_SPECULATION_KEYS = MappingProxyType(
    {
        **SPECULATION_KEYS,
        **sglang_compat.SPECULATION_KEYS,
        sglang_compat.TREE_TOKENS: sglang_compat.TREE_TOKENS,
        "speculative_token_map": "speculative_token_map",
    }
)
"""The same tables with SGLang's names."""


def in_our_words(
    *sources: Mapping[Any, Any], model: str = "", device: str = "cpu"
) -> dict[str, Any]:
    """Merge settings under our names, vLLM's or SGLang's.

    See `specdec.config.vllm_compat.in_our_words`.
    """
    return vllm_compat.in_our_words(
        *map(sglang_compat.in_our_words, sources),
        renamed=ALL_RENAMED,
        always=ALL_ALWAYS,
        speculation_keys=ALL_SPECULATION_KEYS,
        model=model,
        device=device,
    )


def our_name(name: Any) -> Any:
    """Return our name of a setting under vLLM's name, with dashes or underscores."""
    name = name.replace("-", "_") if isinstance(name, str) else name
    return ALL_RENAMED.get(name, name)
