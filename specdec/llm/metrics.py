"""The metrics of an `LLM`: as objects with vLLM's types and names, and as a periodic log line."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from specdec.engine.metrics.metric_definitions import (
    ENGINE_METRICS,
    MODEL_LABEL,
    PREFIX,
    VLLM_NAMES,
    VLLM_PREFIX,
    MetricSpec,
    Reading,
)
from specdec.types.reports.stats import Counts, EngineReport, EngineStats, HistogramCounts

logger = logging.getLogger(__name__)

_PERIOD_S = 10.0

_VECTOR = "spec_decode_num_accepted_tokens_per_pos"
"""The metric whose series, by position, become one Vector."""


@dataclass(frozen=True)
class Metric:
    """A name with its prefix, and labels that distinguish it from others of that name."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    """A value that only grows. Counts are integers, seconds are not."""

    value: int | float


@dataclass(frozen=True)
class Vector(Metric):
    """Counters by position, from 0."""

    values: list[int]

    @property
    def value(self) -> int:
        """The sum over all positions, for programs that read a value from every counter."""
        return sum(self.values)


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
    report: EngineReport, prefix: str | None, model_name: str, num_positions: int
) -> list[Metric]:
    """Return every metric of the engine. num_positions: minimum length of the vector.

    prefix: of the names; None for our own, followed by those that vLLM has too under its names.
    """
    if prefix is not None:
        return _metrics(ENGINE_METRICS, report, prefix, model_name, num_positions)
    aliases = [each for each in ENGINE_METRICS if each.name in VLLM_NAMES]
    return [
        *_metrics(ENGINE_METRICS, report, PREFIX, model_name, num_positions),
        *_metrics(aliases, report, VLLM_PREFIX, model_name, num_positions),
    ]


def _metrics(
    specs: Iterable[MetricSpec[EngineReport]],
    report: EngineReport,
    prefix: str,
    model_name: str,
    num_positions: int,
) -> list[Metric]:
    labels, metrics = {MODEL_LABEL: model_name}, list[Metric]()
    for spec in specs:
        name, readings = prefix + spec.name, list(spec.read(report))
        if spec.name == _VECTOR:
            values = [_count(each) for each in readings]
            metrics.append(Vector(name, labels, values + [0] * (num_positions - len(values))))
        else:
            metrics += [_metric(spec, name, labels, each) for each in readings]
    return metrics


def _metric(
    spec: MetricSpec[EngineReport], name: str, labels: dict[str, str], reading: Reading
) -> Metric:
    own = labels | dict(zip(spec.labels, reading.labels, strict=True))
    if isinstance(reading.value, HistogramCounts):
        return _histogram(name, own, reading.value)
    if spec.type == "counter":
        is_count = float(reading.value).is_integer()
        return Counter(name, own, _count(reading) if is_count else float(reading.value))
    return Gauge(name, own, float(reading.value))


def _count(reading: Reading) -> int:
    assert not isinstance(reading.value, HistogramCounts), "a counter with histogram values"
    return int(reading.value)


def _histogram(name: str, labels: dict[str, str], counts: HistogramCounts) -> Histogram:
    ends = list(accumulate(counts.counts))
    bounds = ["+Inf" if bound == inf else repr(bound) for bound in (*counts.bounds, inf)]
    return Histogram(name, labels, ends[-1], counts.total, dict(zip(bounds, ends, strict=True)))


class StatsLog:
    """Logs at level INFO, as requests end, what was done since the previous line."""

    def __init__(self, is_enabled: bool, clock: Callable[[], float]) -> None:
        self._is_enabled = is_enabled
        self._clock = clock
        self._at_s = clock()
        self._before = Counts()

    def note(self, stats: EngineStats) -> None:
        """Log if the last line is ten seconds old. Call it when a request has ended."""
        if self._is_enabled and self._clock() - self._at_s >= _PERIOD_S:
            self.write(stats)

    def begin(self, stats: EngineStats) -> None:
        """Start the period of the next line."""
        self._at_s, self._before = self._clock(), stats.counts

    def write(self, stats: EngineStats) -> None:
        """Log now, if anything was generated."""
        if not self._is_enabled:
            return
        new = stats.counts.minus(self._before)
        if not new.num_generated_tokens:
            return
        seconds = max(self._clock() - self._at_s, 1e-9)
        logger.info(
            "prompts %.1f tokens/s, answers %.1f tokens/s, %d running, %d waiting, "
            "acceptance rate %.0f%%, acceptance length %.2f",
            new.num_prompt_tokens / seconds,
            new.num_generated_tokens / seconds,
            stats.num_running,
            stats.num_waiting,
            100 * new.speculation.acceptance_rate,
            new.speculation.mean_acceptance_length,
        )
        self.begin(stats)
