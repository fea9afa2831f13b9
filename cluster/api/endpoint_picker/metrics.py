"""The metrics of the picker itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from cluster.api.endpoint_picker.pool import Pool
from cluster.api.endpoint_picker.pool_scaler import PoolScaler

_PREFIX = "specdec:endpoint_picker_"
"""Precedes each name."""


@dataclass(frozen=True)
class PickerMetrics(Collector):
    """Collector of a pool's metrics; an endpoint that is gone has no series."""

    pool: Pool
    scaler: PoolScaler | None = None

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        endpoints = list(self.pool.endpoints)  # scrapes run in another thread
        now_s = self.pool.clock()
        choices = _counter("choices", "Chosen endpoints, by reason.", "endpoint", "reason")
        scrapes = _counter("scrape_errors", "Scrapes without a report.", "endpoint")
        failures = _counter("failed_responses", "Responses with 500, 502 or 503.", "endpoint")
        is_up = _gauge("endpoint_up", "1 for an endpoint that may be chosen, else 0.")
        num_open = _gauge("open_requests", "Requests that have not ended.")
        ages = _gauge("report_age_seconds", "Age of the last report.")
        for each in endpoints:
            for reason, count in list(each.choices.items()):
                choices.add_metric([each.address, reason], count)
            scrapes.add_metric([each.address], each.scrape_errors)
            failures.add_metric([each.address], each.response_errors)
            is_up.add_metric([each.address], each.is_up and not each.is_ejected(now_s))
            num_open.add_metric([each.address], each.num_open)
            if (age_s := each.report_age_s(now_s)) is not None:
                ages.add_metric([each.address], age_s)
        refusals = _counter("refusals", "Requests without an endpoint, by HTTP status.", "code")
        for code in (429, 503):
            refusals.add_metric([str(code)], self.pool.refusals[code])
        yield from (choices, scrapes, failures, is_up, num_open, ages, refusals)
        if self.scaler is None:
            return
        meaning = "Endpoints that count as full for want of reports."
        yield GaugeMetricFamily(_PREFIX + "unread_endpoints", meaning, len(self.scaler.unread))
        if (number := self.scaler.number) is not None:
            meaning = "Replicas needed for the objective."
            yield GaugeMetricFamily(_PREFIX + "replicas_needed", meaning, number)


def registry_of(pool: Pool, scaler: PoolScaler | None = None) -> CollectorRegistry:
    """Return a registry with the metrics of a pool."""
    registry = CollectorRegistry()
    registry.register(PickerMetrics(pool, scaler))
    return registry


def _counter(name: str, meaning: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(_PREFIX + name, meaning, labels=labels)


def _gauge(name: str, meaning: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(_PREFIX + name, meaning, labels=("endpoint",))
