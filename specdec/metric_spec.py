"""What a metric is, and how to say where one of an engine takes its values from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from specdec.counts import Counts, HistogramCounts

PREFIX = "specdec:"
MODEL_LABEL = "model_name"

MetricType = Literal["gauge", "counter", "histogram"]
Source = TypeVar("Source")


@dataclass(frozen=True)
class Reading:
    """One value of a metric. labels: values of the metric's own labels, in their order."""

    value: float | HistogramCounts
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class MetricSpec(Generic[Source]):
    """One metric. read: its values, of what it is about; none where nothing is known.

    name: without the prefix and, of a counter, without `_total`. labels: beside those that say
    which model and, of a service, which replica.
    """

    name: str
    type: MetricType
    meaning: str
    read: Callable[[Source], Iterable[Reading]]
    labels: tuple[str, ...] = ()

    @property
    def exposed_name(self) -> str:
        """As it is queried; a histogram's series add _bucket, _sum and _count."""
        return PREFIX + self.name + ("_total" if self.type == "counter" else "")


class EngineReport(Protocol):
    """How an engine is; `specdec.client.ReplicaReport` says what each of these means."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_decoding(self) -> int: ...
    @property
    def kv_cache_usage(self) -> float: ...
    @property
    def is_speculation_on(self) -> bool: ...
    @property
    def num_chosen_tokens(self) -> int: ...
    @property
    def estimated_speedup(self) -> float | None: ...
    @property
    def estimated_tokens_per_s(self) -> float | None: ...
    @property
    def mode(self) -> str: ...
    @property
    def counts(self) -> Counts: ...


def one(value: float | None) -> tuple[Reading, ...]:
    """The reading of what may not be known."""
    return () if value is None else (Reading(value),)


def gauge(
    name: str, meaning: str, read: Callable[[EngineReport], float | None]
) -> MetricSpec[EngineReport]:
    """What a report says; no series where that is None."""
    return MetricSpec(name, "gauge", meaning, lambda report: one(read(report)))


def counter(name: str, meaning: str, read: Callable[[Counts], float]) -> MetricSpec[EngineReport]:
    """One of a report's counts."""
    return MetricSpec(name, "counter", meaning, lambda report: one(read(report.counts)))


def counters(
    name: str, meaning: str, label: str, read: Callable[[Counts], Mapping[str, float]]
) -> MetricSpec[EngineReport]:
    """A counter for each value of one label."""

    def readings(report: EngineReport) -> Iterable[Reading]:
        return (Reading(count, (value,)) for value, count in read(report.counts).items())

    return MetricSpec(name, "counter", meaning, readings, (label,))


def by_method(
    name: str, meaning: str, read: Callable[[Counts], Mapping[str, tuple[int, ...]]]
) -> MetricSpec[EngineReport]:
    """A counter for each method and position."""

    def readings(report: EngineReport) -> Iterable[Reading]:
        for method, by_position in read(report.counts).items():
            for position, count in enumerate(by_position):
                yield Reading(count, (method, str(position)))

    return MetricSpec(name, "counter", meaning, readings, ("method", "position"))


def histogram(name: str, meaning: str) -> MetricSpec[EngineReport]:
    """The report's histogram of that name; no series before there is one."""

    def readings(report: EngineReport) -> Iterable[Reading]:
        counts = report.counts.histograms.get(name)
        return () if counts is None else (Reading(counts),)

    return MetricSpec(name, "histogram", meaning, readings)
