"""Sections of the settings in `specdec serve --help` and the configuration reference."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

OTHER = "Other settings"

SECTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Model": (
            *("model", "served_model_name", "dtype", "quantization", "device", "kernels"),
            *("tensor_parallel_size", "generation_config", "tool_call_parser"),
        ),
        "Speculation": ("speculative_config",),
        "Scheduling": (
            *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_prefill_tokens"),
            *("max_queue_len", "queue_timeout_s", "stream_interval", "async_scheduling"),
            "step_timeout_s",
        ),
        "Memory": (
            *("gpu_memory_utilization", "kv_cache_memory_gib", "block_size"),
            "enable_prefix_caching",
        ),
        "Replicas": (
            *("num_replicas", "min_replicas", "max_replicas", "target_requests_per_replica"),
            *("upscale_delay_s", "downscale_delay_s", "start_timeout_s", "drain_timeout_s"),
            *("transport", "ray_address", "target_labels", "draft_labels"),
        ),
        "Network": (
            *("ingress", "host", "http_port", "grpc_port", "http_max_body_mib"),
            *("grpc_max_message_mib", "request_timeout_s"),
        ),
        "Security": ("api_key_file", "admin_token_file", "tls_cert_file", "tls_key_file"),
        "Observability": (
            *("log_level", "log_format", "otlp_traces_endpoint", "profile_dir", "profile_max_mib"),
            "state_dir",
        ),
    }
)


def section_of(setting: str) -> str:
    """Return the heading of a setting's section."""
    return next((name for name, members in SECTIONS.items() if setting in members), OTHER)
