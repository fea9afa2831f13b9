"""Reads metrics with the parsers of Prometheus' client."""

from __future__ import annotations

from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_text

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"

Key = tuple[str, ...]


def families(text: str) -> dict[str, Metric]:
    """Return families of Prometheus' text format by name without the prefix."""
    return {each.name.removeprefix("specdec:"): each for each in parse_text(text)}


def open_families(text: str) -> dict[str, Metric]:
    """Return families of OpenMetrics' format by name without the prefix."""
    return {each.name.removeprefix("specdec:"): each for each in parse_open(text)}


def samples(text: str, replica: str | None) -> dict[Key, float]:
    """Return a replica's samples by name and other labels; None: those without a replica."""
    return {
        (sample.name.removeprefix("specdec:"), *_own_labels(sample.labels)): sample.value
        for family in families(text).values()
        for sample in family.samples
        if sample.labels.get("replica") == replica
    }


def _own_labels(labels: dict[str, str]) -> list[str]:
    return [labels[name] for name in sorted(labels) if name not in ("model_name", "replica")]
