"""What vLLM calls things that a service is told: which of it is the same here, and which is not.

Names are those of settings, with underscores; a flag has dashes instead. What is in no table and is
no setting of ours is refused as unknown. What is said of engines is in `specdec.config.vllm_compat`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from specdec.config.vllm_compat import ALWAYS as ENGINES_ALWAYS
from specdec.config.vllm_compat import NOT_HERE as ENGINES_NOT_HERE
from specdec.config.vllm_compat import Always, Words

SAME = (
    *("model", "served_model_name", "dtype", "quantization", "device", "generation_config"),
    *("tensor_parallel_size", "gpu_memory_utilization", "block_size", "enable_prefix_caching"),
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "stream_interval"),
    "async_scheduling",
    *("speculative_config", "host", "otlp_traces_endpoint", "tool_call_parser"),
)
"""Settings of the same meaning under the same name."""

RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "port": "http_port",
        "ssl_certfile": "tls_cert_file",
        "ssl_keyfile": "tls_key_file",
    }
)
"""Settings of the same meaning under another name."""

ALWAYS: Mapping[str, Always] = MappingProxyType(
    {
        **ENGINES_ALWAYS,
        "disable_log_requests": Always(True, "requests are logged with --log-level info alone"),
        "disable_log_stats": Always(False, "statistics are kept, for /metrics"),
        "disable_uvicorn_access_log": Always(True, "there is no access log"),
        "distributed_executor_backend": Always("ray", "ranks are actors of Ray"),
        "enable_auto_tool_choice": Always(True, "a request decides, by its tool_choice"),
        "enable_log_requests": Always(False, "requests are logged with --log-level info alone"),
        "enable_prompt_tokens_details": Always(True, "the usage tells of cached tokens"),
        "enable_request_id_headers": Always(True, "answers have X-Request-Id"),
    }
)
"""Settings that may be given, with the one value that is so anyway."""

_BY_REPLICA = "given as num_replicas or max_replicas, with ingress serve"
_NO_ORIGINS = "left out: pages of other sites may not call the service"

NOT_HERE: Mapping[str, str] = MappingProxyType(
    {
        **ENGINES_NOT_HERE,
        "allowed_origins": _NO_ORIGINS,
        "allowed_methods": _NO_ORIGINS,
        "allowed_headers": _NO_ORIGINS,
        "allow_credentials": _NO_ORIGINS,
        "api_server_count": _BY_REPLICA,
        "kv_cache_memory_bytes": "given as kv_cache_memory_gib, in GiB",
        "max_log_len": "left out: no text of a request is logged",
        "middleware": "left out: put a proxy before the service",
        "reasoning_parser": "left out: thoughts stay in the text",
        "response_role": "left out: it is assistant",
        "revision": "left out: model takes it behind an @, as in org/name@revision",
        "root_path": "left out: have the proxy take its prefix away",
        "seed": "left out: each request has a seed, which its answer names",
        "ssl_ca_certs": "left out: callers are known by keys, not by certificates",
        "tokenizer": "left out: a model and its tokenizer are in one place",
        "tool_parser_plugin": "left out: tool_call_parser names the formats there are",
        "uds": "left out: the service listens on ports",
        "uvicorn_log_level": "given as log_level",
        "worker_use_ray": "left out: ranks are actors of Ray",
    }
)
"""Settings that have no meaning here, or one that needs a thought: what they must be."""

SERVICE = Words(RENAMED, ALWAYS, NOT_HERE)
