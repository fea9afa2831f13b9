"""Reports of endpoints: their metrics by the names of the model server protocol.

Accepts this service's names, vLLM's and SGLang's, and of several engines the sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

from prometheus_client.parser import text_string_to_metric_families

from cluster.control.replica_scaler import Totals
from specdec.types.errors import InvalidValueError
from specdec.types.reports.service_curve import ServiceCurve
from specdec.types.reports.stats import FAILED

_PREFIXES = ("specdec:", "vllm:", "sglang:")
"""The first of them whose metrics an endpoint has is read."""

_SGLANG_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "num_requests_running": "num_running_reqs",
        "num_requests_waiting": "num_queue_reqs",
        "kv_cache_usage_perc": "token_usage",
    }
)
_NAMES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "cache_config_info",
    "lora_requests_info",
    "replica_ready",
)
_OBJECTIVE_NAMES = (
    "num_requests_decoding",
    "expected_stream_tokens_per_second",
    "expected_prompt_tokens_per_second",
    "requests_received_total",
    "prompt_tokens_total",
    "prompt_tokens_cached_total",
    "generation_tokens_total",
    "request_success_total",
)
"""Read under an objective only."""
_CENSORED = ("abort", FAILED)
"""The `finished_reason` of outputs that are not complete; vLLM has both."""
OUTPUT_TOKENS, _NUM_ASSUMED = 256.0, 8
"""Expected tokens of an output before any has ended, and the number of outputs that these are."""
_LOADED = "loaded_lora_adapters"
_MAX_SAMPLES = 256
"""Samples that are read of a response: a few of each engine."""
_MAX_REQUESTS = 2**20
_MAX_CACHE_TOKENS = 2**22
_MAX_ADAPTERS = 1024
_MAX_COUNT = 1e15

Sample = tuple[str, Mapping[str, str], float]


@dataclass(frozen=True)
class EndpointReport:
    """The report of an endpoint in one scrape.

    kv_cache_usage: from 0 to 1. cache_tokens: capacity of the KV cache; None if it is unknown.
    adapters: LoRA adapters of running and of queued requests. max_adapters: most of them in one
    step; None without LoRA. is_ready: None where the metrics do not contain it. models: names that
    requests may use, of the model and of `loaded_adapters`; None where the metrics lack them.
    num_decoding: running requests past their prompt; all where it is unknown. curve: expected rates
    by load; None without them. output_tokens: expected of an output. totals: counters since its
    start; None without one of arrivals.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    cache_tokens: int | None = None
    adapters: frozenset[str] = frozenset()
    max_adapters: int | None = None
    is_ready: bool | None = None
    models: frozenset[str] | None = None
    loaded_adapters: frozenset[str] = frozenset()
    num_decoding: int = 0
    curve: ServiceCurve | None = None
    output_tokens: float = OUTPUT_TOKENS
    totals: Totals | None = None

    @property
    def num_requests(self) -> int:
        """Requests that run or wait."""
        return self.num_running + self.num_waiting


@cache
def metric_names(*, has_objective: bool) -> tuple[str, ...]:
    """Return the names by which servers select what `parse_report` reads."""
    names = _NAMES + _OBJECTIVE_NAMES * has_objective
    return tuple(_name(prefix, name) for prefix in _PREFIXES for name in names)


def parse_report(text: str, *, has_objective: bool = True) -> EndpointReport:
    """Parse metrics in Prometheus' text format.

    Raises ValueError for a text that has no number of requests, or is no such text.
    """
    samples = _samples(text, metric_names(has_objective=has_objective))
    names = _NAMES + _OBJECTIVE_NAMES
    for prefix in _PREFIXES:
        found = {name: samples.get(_name(prefix, name), []) for name in names}
        if found["num_requests_running"]:
            report = _report(found)
            return _with_names(report, found) if prefix == _PREFIXES[0] else report
    raise ValueError(f"no metric {_name(_PREFIXES[0], _NAMES[0])}, nor vLLM's or SGLang's")


def _name(prefix: str, name: str) -> str:
    return prefix + (_SGLANG_NAMES.get(name, name) if prefix == "sglang:" else name)


def _samples(text: str, names: tuple[str, ...]) -> Mapping[str, Sequence[Sample]]:
    """Return the samples of these names by name; the parser gets no other lines."""
    lines = [
        line for line in text.splitlines() if line.startswith(names) and "_bucket{" not in line
    ]
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families("\n".join(lines[:_MAX_SAMPLES]) + "\n"):
        for sample in family.samples:
            if math.isfinite(sample.value):
                found.setdefault(sample.name, []).append((sample.name, sample.labels, sample.value))
    return found


def _report(found: Mapping[str, Sequence[Sample]]) -> EndpointReport:
    labels = _adapter_labels(found)
    ready = [value > 0 for _, _, value in found["replica_ready"]]
    usages = [value for _, _, value in found["kv_cache_usage_perc"]]
    num_running, decoding = _total(found["num_requests_running"]), found["num_requests_decoding"]
    return EndpointReport(
        num_running=num_running,
        num_waiting=_total(found["num_requests_waiting"]),
        kv_cache_usage=min(1.0, max([0.0, *usages])),
        cache_tokens=_cache_tokens([each[1] for each in found["cache_config_info"]]),
        adapters=_names_in(labels, "running_lora_adapters", "waiting_lora_adapters"),
        max_adapters=_integer(labels.get("max_lora")) if labels else None,
        is_ready=all(ready) if ready else None,
        num_decoding=min(num_running, _total(decoding)) if decoding else num_running,
        curve=_curve(found),
        output_tokens=_output_tokens(found),
        totals=_totals(found),
    )


def _sum(samples: Sequence[Sample]) -> float:
    return sum(min(_MAX_COUNT, max(0.0, value)) for _, _, value in samples)


def expected_output_tokens(num_tokens: float, num_ended: float) -> float:
    """Return the expected tokens of an output. num_tokens: generated, by running requests too.

    After a start, the mean of finished ones would be that of the short ones. This is the estimate
    for exponentially distributed lengths of which running and aborted ones are censored.
    """
    return (num_tokens + OUTPUT_TOKENS * _NUM_ASSUMED) / (num_ended + _NUM_ASSUMED)


def _output_tokens(found: Mapping[str, Sequence[Sample]]) -> float:
    """Return the expected tokens of an output."""
    ended = found["request_success_total"]
    if not ended:
        return OUTPUT_TOKENS
    complete = [each for each in ended if each[1].get("finished_reason") not in _CENSORED]
    num_tokens = _sum(found["generation_tokens_total"])
    return expected_output_tokens(num_tokens, _sum(complete))


def _totals(found: Mapping[str, Sequence[Sample]]) -> Totals | None:
    """Return the counters of requests and tokens; None for a server that counts no arrivals."""
    if not found["requests_received_total"]:
        return None
    ended = found["request_success_total"]
    return Totals.of_counters(
        num_requests=_sum(found["requests_received_total"]),
        prompt_tokens=_sum(found["prompt_tokens_total"]),
        cached_tokens=_sum(found["prompt_tokens_cached_total"]),
        output_tokens=_sum(found["generation_tokens_total"]),
        num_ended=_sum(ended),
        num_failed=_sum([each for each in ended if each[1].get("finished_reason") == FAILED]),
    )


def _curve(found: Mapping[str, Sequence[Sample]]) -> ServiceCurve | None:
    """Return the curve of one engine; None without one, or where it is none."""
    prompts = found["expected_prompt_tokens_per_second"]
    rates = {
        _integer(labels.get("streams")): rate
        for _, labels, rate in found["expected_stream_tokens_per_second"]
    }
    if len(prompts) != 1:
        return None
    with suppress(InvalidValueError):
        sizes = sorted(rates)
        return ServiceCurve(tuple(sizes), tuple(map(rates.__getitem__, sizes)), prompts[0][2])
    return None


def _with_names(report: EndpointReport, found: Mapping[str, Sequence[Sample]]) -> EndpointReport:
    """Return the report of a server whose metrics name its model and its adapters."""
    labels = _adapter_labels(found)
    model = found["num_requests_running"][0][1].get("model_name")
    if model is None or (labels and _LOADED not in labels):
        return report
    loaded = _names_in(labels, _LOADED)
    return replace(report, models=loaded | {model}, loaded_adapters=loaded)


def _adapter_labels(found: Mapping[str, Sequence[Sample]]) -> Mapping[str, str]:
    """Return the labels about adapters; none without LoRA. Values are times: the newest counts."""
    infos = found["lora_requests_info"]
    return max(infos, key=lambda each: each[2])[1] if infos else {}


def _total(samples: Sequence[Sample]) -> int:
    return sum(round(min(_MAX_REQUESTS, max(0.0, value))) for _, _, value in samples)


def _cache_tokens(configs: Sequence[Mapping[str, str]]) -> int | None:
    """Return the capacity of all engines; labels of vLLM, or SGLang's of the same meaning."""
    sizes = [
        _integer(each.get("block_size", each.get("page_size")))
        * _integer(each.get("num_gpu_blocks", each.get("num_pages")))
        for each in configs
    ]
    return min(sum(sizes), _MAX_CACHE_TOKENS) if sum(sizes) > 0 else None


def _names_in(labels: Mapping[str, str], *names: str) -> frozenset[str]:
    """Return the adapters in labels, which have commas between them."""
    found = [each.strip() for name in names for each in labels.get(name, "").split(",")]
    return frozenset(each for each in found[:_MAX_ADAPTERS] if each)


def _integer(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0
