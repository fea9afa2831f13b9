"""Metrics of replicas under the names of others, for dashboards that query those.

vLLM's names differ in the prefix alone, but for two. SGLang's names are those of its page on
production metrics. Those of OpenTelemetry are its metrics of generative AI servers as its exporter
for Prometheus writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

from cluster.observability.metric_definitions import REPLICA_METRICS
from specdec.engine.metrics.metric_definitions import (
    VLLM_NAMES,
    VLLM_PREFIX,
    MetricSpec,
    Reading,
    gauge,
)
from specdec.engine.metrics.metrics import SERVER_LATENCIES
from specdec.types.reports.fleet import ReplicaStatus

MetricAliases = Literal["none", "vllm", "sglang", "otel", "all"]
"""Whose names are exposed beside our own."""

SGLANG_PREFIX = "sglang:"
_OTEL_PREFIX = "gen_ai_server_"

_SGLANG_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "num_requests_running": "num_running_reqs",
        "num_requests_waiting": "num_queue_reqs",
        "kv_cache_usage_perc": "token_usage",
        "prompt_tokens": "prompt_tokens",
        "generation_tokens": "generation_tokens",
        "time_to_first_token_seconds": "time_to_first_token_seconds",
        "inter_token_latency_seconds": "inter_token_latency_seconds",
        "e2e_request_latency_seconds": "e2e_request_latency_seconds",
    }
)
"""SGLang's name by ours, for metrics with the same type and meaning."""

PROVIDER = "specdec"
"""The attribute gen_ai.provider.name of OpenTelemetry."""

_COUNTS = "report.counts"

_SGLANG_RATIOS: tuple[MetricSpec[ReplicaStatus], ...] = (
    gauge(
        "spec_accept_length",
        "Tokens that a draft of speculative decoding yields, the target's own included.",
        f"{_COUNTS}.speculation.mean_acceptance_length",
    ),
    gauge(
        "spec_accept_rate",
        "Accepted tokens for each drafted one.",
        f"{_COUNTS}.speculation.acceptance_rate",
    ),
    gauge(
        "cache_hit_rate",
        "Part of the prompt tokens found in the prefix cache, from 0 to 1.",
        lambda status: (
            status.report.counts.num_cached_tokens / max(1, status.report.counts.num_prompt_tokens)
        ),
    ),
)

_VLLM_OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {"prompt_tokens": "prefix_cache_queries", "prompt_tokens_cached": "prefix_cache_hits"}
)
"""vLLM's name by ours, for metrics that have another; it counts both in tokens."""

_VLLM: tuple[MetricSpec[ReplicaStatus], ...] = (
    *(replace(each, prefix=VLLM_PREFIX) for each in REPLICA_METRICS if each.name in VLLM_NAMES),
    *(
        replace(each, prefix=VLLM_PREFIX, name=_VLLM_OTHER_NAMES[each.name])
        for each in REPLICA_METRICS
        if each.name in _VLLM_OTHER_NAMES
    ),
)
_SGLANG: tuple[MetricSpec[ReplicaStatus], ...] = (
    *(
        replace(each, prefix=SGLANG_PREFIX, name=_SGLANG_NAMES[each.name])
        for each in REPLICA_METRICS
        if each.name in _SGLANG_NAMES
    ),
    *(replace(each, prefix=SGLANG_PREFIX) for each in _SGLANG_RATIOS),
)


def _server_latency(name: str) -> MetricSpec[ReplicaStatus]:
    """Define a metric of OpenTelemetry; no series before a request has ended."""

    def readings(status: ReplicaStatus) -> Iterable[Reading]:
        by_operation = status.report.counts.server_latencies.get(name, {})
        for operation, by_error in by_operation.items():
            for error_type, counts in by_error.items():
                yield Reading(counts, (operation, PROVIDER, error_type))

    return MetricSpec(
        name,
        "histogram",
        SERVER_LATENCIES[name][0],
        readings,
        ("gen_ai_operation_name", "gen_ai_provider_name", "error_type"),
        _OTEL_PREFIX,
        ("gen_ai_request_model", "gen_ai_response_model"),
    )


_OTEL = tuple(map(_server_latency, SERVER_LATENCIES))

ALIASES: Mapping[MetricAliases, tuple[MetricSpec[ReplicaStatus], ...]] = MappingProxyType(
    {
        "none": (),
        "vllm": _VLLM,
        "sglang": _SGLANG,
        "otel": _OTEL,
        "all": (*_VLLM, *_SGLANG, *_OTEL),
    }
)
"""The aliases by the value of metric_aliases."""
