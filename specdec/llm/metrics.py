"""The metrics of an `LLM` as objects, of vLLM's types and names, behind a prefix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from specdec.engine.metric_definitions import (
    ENGINE_METRICS,
    MODEL_LABEL,
    EngineReport,
    MetricSpec,
    Reading,
)
from specdec.types.counters import Counts, HistogramCounts
from specdec.types.stats import EngineStats

_VECTOR = "spec_decode_num_accepted_tokens_per_pos"
"""The one metric whose series are told as one, by position."""


@dataclass(frozen=True)
class Metric:
    """A name with its prefix, and labels that tell it from others of that name."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    """What only ever grows."""

    value: int


@dataclass(frozen=True)
class Vector(Metric):
    """Counters by position, from 0."""

    values: list[int]


@dataclass(frozen=True)
class Gauge(Metric):
    """What goes up and down."""

    value: float


@dataclass(frozen=True)
class Histogram(Metric):
    """Observations. buckets: how many did not exceed a bound, by the bound; `+Inf` has all."""

    count: int
    sum: float
    buckets: dict[str, int]


@dataclass(frozen=True)
class LLMReport:
    """How the engine of an `LLM` is; see EngineReport."""

    num_running: int
    num_waiting: int
    num_decoding: int
    kv_cache_usage: float
    is_speculation_on: bool
    num_chosen_tokens: int
    estimated_speedup: float | None
    estimated_tokens_per_s: float | None
    mode: str
    counts: Counts = field(default_factory=Counts)

    @classmethod
    def of(cls, stats: EngineStats, mode: str, counts: Counts) -> LLMReport:
        """mode: of speculation; empty where nothing can draft."""
        return cls(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_decoding=stats.num_decoding,
            kv_cache_usage=1 - stats.num_free_blocks / stats.num_blocks,
            is_speculation_on=stats.is_speculation_on,
            num_chosen_tokens=stats.decision.num_draft_tokens if stats.decision else 0,
            estimated_speedup=stats.estimated_speedup,
            estimated_tokens_per_s=stats.estimated_tokens_per_s,
            mode=mode,
            counts=counts,
        )


def metrics_of(
    report: EngineReport, prefix: str, model_name: str, num_positions: int
) -> list[Metric]:
    """Every metric of the engine. num_positions: fewest values of the vector by position."""
    labels = {MODEL_LABEL: model_name}
    return [
        metric
        for spec in ENGINE_METRICS
        for metric in _metrics(spec, report, prefix, labels, num_positions)
    ]


def _metrics(
    spec: MetricSpec[EngineReport],
    report: EngineReport,
    prefix: str,
    labels: dict[str, str],
    num_positions: int,
) -> Iterator[Metric]:
    name, readings = prefix + spec.name, list(spec.read(report))
    if spec.name == _VECTOR:
        values = [_count(each) for each in readings]
        yield Vector(name, labels, values + [0] * (num_positions - len(values)))
        return
    for reading in readings:
        own = labels | dict(zip(spec.labels, reading.labels, strict=True))
        if isinstance(reading.value, HistogramCounts):
            yield _histogram(name, own, reading.value)
        elif spec.type == "counter":
            yield Counter(name, own, _count(reading))
        else:
            yield Gauge(name, own, float(reading.value))


def _count(reading: Reading) -> int:
    assert not isinstance(reading.value, HistogramCounts), "a counter that is a histogram"
    return int(reading.value)


def _histogram(name: str, labels: dict[str, str], counts: HistogramCounts) -> Histogram:
    ends = list(accumulate(counts.counts))
    bounds = ["+Inf" if bound == inf else repr(bound) for bound in (*counts.bounds, inf)]
    return Histogram(name, labels, ends[-1], counts.total, dict(zip(bounds, ends, strict=True)))
