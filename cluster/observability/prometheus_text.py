"""Renders the metrics as text for Prometheus."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import TypeVar

from prometheus_client import CollectorRegistry, exposition
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from cluster.observability.metric_aliases import ALIASES, MetricAliases
from cluster.observability.metric_definitions import (
    CONNECTION_METRICS,
    FLEET_METRICS,
    REPLICA_LABEL,
    REPLICA_METRICS,
    FleetView,
)
from specdec.engine.metrics.metric_definitions import MODEL_LABEL, MetricSpec
from specdec.types.reports.fleet import ReplicaStatus
from specdec.types.reports.stats import HistogramCounts

_OPEN_METRICS = "application/openmetrics-text"

Source = TypeVar("Source")
Labels = dict[str, str]


@dataclass(frozen=True)
class Exposition:
    """The text in the format that the scraper requested."""

    body: bytes
    content_type: str


def fleet_families(views: Mapping[str, FleetView], aliases: MetricAliases = "none") -> list[Metric]:
    """Return the metrics of all replicas of each model, by labels, and those of each fleet."""
    replicas = [
        (each, _labels(model_name, each))
        for model_name, view in views.items()
        for each in view.fleet.status.replicas
    ]
    fleets = [(view, {MODEL_LABEL: model_name}) for model_name, view in views.items()]
    return [
        *(_family(spec, replicas) for spec in (*REPLICA_METRICS, *ALIASES[aliases])),
        *(_family(spec, fleets) for spec in FLEET_METRICS),
    ]


def replica_families(
    model_name: str,
    status: ReplicaStatus,
    *,
    is_connected: bool,
    aliases: MetricAliases = "none",
    names: Collection[str] = (),
) -> list[Metric]:
    """Return the metrics of this replica alone.

    is_connected: to the ControlPlane. names: of the metrics to return; empty for all.
    """
    labels = _labels(model_name, status)
    specs = (*REPLICA_METRICS, *ALIASES[aliases])
    of_connection = _selected(CONNECTION_METRICS, names)
    return [
        *(_family(spec, [(status, labels)]) for spec in _selected(specs, names)),
        *(_family(spec, [(is_connected, labels)]) for spec in of_connection),
    ]


def _selected(
    specs: Iterable[MetricSpec[Source]], names: Collection[str]
) -> list[MetricSpec[Source]]:
    return [spec for spec in specs if not names or spec.exposed_name in names]


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


def _labels(model_name: str, status: ReplicaStatus) -> Labels:
    return {MODEL_LABEL: model_name, REPLICA_LABEL: status.report.replica_id}


def _family(spec: MetricSpec[Source], sources: Iterable[tuple[Source, Labels]]) -> Metric:
    """Return all series of one metric; a metric without series is listed, too."""
    family = Metric(spec.family_name, spec.meaning, spec.type)
    for source, common in sources:
        common = common | dict.fromkeys(spec.model_labels, common[MODEL_LABEL])
        for reading in spec.read(source):
            labels = common | dict(zip(spec.labels, reading.labels, strict=True))
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
