"""The metrics of an `LLM` as objects, with vLLM's types and names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from specdec.engine.metric_definitions import (
    ENGINE_METRICS,
    MODEL_LABEL,
    EngineReport,
    MetricSpec,
    Reading,
)
from specdec.types.stats import HistogramCounts

_VECTOR = "spec_decode_num_accepted_tokens_per_pos"
"""The metric whose series, by position, become one Vector."""


@dataclass(frozen=True)
class Metric:
    """A name with its prefix, and labels that distinguish it from others of that name."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    """A value that only grows."""

    value: int


@dataclass(frozen=True)
class Vector(Metric):
    """Counters by position, from 0."""

    values: list[int]


@dataclass(frozen=True)
class Gauge(Metric):
    """A value that goes up and down."""

    value: float


@dataclass(frozen=True)
class Histogram(Metric):
    """A cumulative histogram. buckets: observations up to each bound; `+Inf` has all."""

    count: int
    sum: float
    buckets: dict[str, int]


def metrics_of(
    report: EngineReport, prefix: str, model_name: str, num_positions: int
) -> list[Metric]:
    """Return every metric of the engine. num_positions: minimum length of the vector."""
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
    assert not isinstance(reading.value, HistogramCounts), "a counter with histogram values"
    return int(reading.value)


def _histogram(name: str, labels: dict[str, str], counts: HistogramCounts) -> Histogram:
    ends = list(accumulate(counts.counts))
    bounds = ["+Inf" if bound == inf else repr(bound) for bound in (*counts.bounds, inf)]
    return Histogram(name, labels, ends[-1], counts.total, dict(zip(bounds, ends, strict=True)))
