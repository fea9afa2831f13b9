"""Renders the metrics as text for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, exposition
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from cluster.observability.metric_definitions import (
    FLEET_METRICS,
    LINK_METRICS,
    REPLICA_LABEL,
    REPLICA_METRICS,
    FleetView,
    LinkView,
)
from specdec.engine.metric_definitions import MODEL_LABEL, PREFIX, MetricSpec
from specdec.types.fleet import ReplicaStatus
from specdec.types.stats import HistogramCounts

_OPEN_METRICS = "application/openmetrics-text"

Source = TypeVar("Source")
Labels = dict[str, str]


@dataclass(frozen=True)
class _Labelled(Generic[Source]):
    """A source of metrics, and the labels of all its series."""

    source: Source
    labels: Labels


@dataclass(frozen=True)
class Exposition:
    """The text in the format that the scraper requested."""

    body: bytes
    content_type: str


def fleet_families(views: Mapping[str, FleetView]) -> list[Metric]:
    """Return the metrics of all replicas of each model, by labels, and those of each fleet."""
    replicas = [
        _labelled(each, each, model_name)
        for model_name, view in views.items()
        for each in view.fleet.status.replicas
    ]
    fleets = [_Labelled(view, {MODEL_LABEL: model_name}) for model_name, view in views.items()]
    return [*_families(REPLICA_METRICS, replicas), *_families(FLEET_METRICS, fleets)]


def replica_families(model_name: str, status: ReplicaStatus, link: LinkView) -> list[Metric]:
    """Return the metrics of this replica alone."""
    return [
        *_families(REPLICA_METRICS, [_labelled(status, status, model_name)]),
        *_families(LINK_METRICS, [_labelled(link, status, model_name)]),
    ]


def expose(families: Sequence[Metric], accept: str) -> Exposition:
    """Render in Prometheus' text format, or OpenMetrics where the Accept header asks for it."""
    registry = CollectorRegistry()
    registry.register(_Collected(families))
    if _OPEN_METRICS in accept:
        # With its other escaping rules the encoder replaces our colon, in some lines only.
        body: bytes = openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)
        return Exposition(body, openmetrics.CONTENT_TYPE_LATEST)
    return Exposition(exposition.generate_latest(registry), exposition.CONTENT_TYPE_PLAIN_0_0_4)


class _Collected(Collector):
    """Collector of families that were made before, as a registry requires."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _labelled(source: Source, status: ReplicaStatus, model_name: str) -> _Labelled[Source]:
    labels = {MODEL_LABEL: model_name, REPLICA_LABEL: status.report.replica_id}
    return _Labelled(source, labels)


def _families(
    specs: Iterable[MetricSpec[Source]], sources: Sequence[_Labelled[Source]]
) -> Iterator[Metric]:
    return (_family(spec, sources) for spec in specs)


def _family(spec: MetricSpec[Source], sources: Sequence[_Labelled[Source]]) -> Metric:
    """Return all series of one metric; a metric without series is listed, too."""
    family = Metric(PREFIX + spec.name, spec.meaning, spec.type)
    for each in sources:
        for reading in spec.read(each.source):
            labels = each.labels | dict(zip(spec.labels, reading.labels, strict=True))
            if isinstance(reading.value, HistogramCounts):
                _add_buckets(family, labels, reading.value)
            else:
                family.add_sample(spec.exposed_name, labels, float(reading.value))
    return family


def _add_buckets(family: Metric, labels: Labels, counts: HistogramCounts) -> None:
    """Add the cumulative buckets of Prometheus."""
    cumulative = list(accumulate(counts.counts))
    for bound, count in zip((*counts.bounds, inf), cumulative, strict=True):
        family.add_sample(f"{family.name}_bucket", labels | {"le": floatToGoString(bound)}, count)
    family.add_sample(f"{family.name}_count", labels, cumulative[-1])
    family.add_sample(f"{family.name}_sum", labels, counts.total)
