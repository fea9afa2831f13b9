"""PromQL expressions over the service's metrics, for the panels of the dashboard.

Every expression selects the model and the replicas that the user of the dashboard has chosen.
Rates come before sums and sums before ratios, so that a restarted replica causes no jump.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.observability.metric_definitions import REPLICA_LABEL
from specdec.engine.metrics.metric_definitions import MODEL_LABEL, PREFIX

WINDOW = "$__rate_interval"


@dataclass(frozen=True)
class Query:
    """PromQL expression and the legend of its series; `legend` may contain {{labels}}."""

    expr: str
    legend: str


def series(name: str, where: str = "") -> str:
    """Return the selector of a metric; `name` is its exposed name without the prefix.

    where: matcher of another label.
    """
    chosen = f'{MODEL_LABEL}="$model_name"'
    if not name.startswith("fleet_"):
        chosen += f', {REPLICA_LABEL}=~"$replica"'
    if where:
        chosen += f", {where}"
    return f"{PREFIX}{name}{{{chosen}}}"


def total(name: str, by: str = "") -> str:
    """Return the sum of a gauge over all replicas, or for each value of the labels `by`."""
    return f"{_sum(by)}({series(name)})"


def rate(name: str, by: str = "", where: str = "") -> str:
    """Return the rate of a counter, over all replicas or for each value of the labels `by`."""
    return f"{_sum(by)}(rate({series(name, where)}[{WINDOW}]))"


def ratio(part: str, whole: str, by: str = "") -> str:
    """Return the rate of one counter divided by that of another."""
    return f"{rate(part, by)} / {rate(whole, by)}"


def mean(histogram: str) -> str:
    """Return the mean of a histogram's observations."""
    return ratio(f"{histogram}_sum", f"{histogram}_count")


def quantile(share: float, histogram: str) -> str:
    """Return a quantile of a histogram; `share` is from 0 to 1."""
    return f"histogram_quantile({share:g}, {rate(f'{histogram}_bucket', 'le')})"


def quantiles(histogram: str) -> tuple[Query, ...]:
    """Return the median, the 95th and the 99th percentile of a histogram."""
    shares = ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
    return tuple(Query(quantile(share, histogram), legend) for share, legend in shares)


def _sum(by: str) -> str:
    return f"sum by ({by}) " if by else "sum"
