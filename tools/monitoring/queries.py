"""PromQL over the service's metrics, for the panels of the dashboard.

Every expression is narrowed to the model and the replicas that the dashboard's reader has chosen.
Rates come before sums and sums before ratios, so that a replica that starts anew makes no jump.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.observability.metric_definitions import REPLICA_LABEL
from specdec.engine.metric_definitions import MODEL_LABEL, PREFIX

WINDOW = "$__rate_interval"


@dataclass(frozen=True)
class Query:
    """An expression, and how Grafana names its series; `legend` may hold {{labels}}."""

    expr: str
    legend: str


def series(name: str) -> str:
    """A metric by its exposed name without the prefix."""
    chosen = f'{MODEL_LABEL}="$model_name"'
    if not name.startswith("fleet_"):
        chosen += f', {REPLICA_LABEL}=~"$replica"'
    return f"{PREFIX}{name}{{{chosen}}}"


def total(name: str, by: str = "") -> str:
    """A gauge over all replicas, or for each value of a label."""
    return f"{_sum(by)}({series(name)})"


def rate(name: str, by: str = "") -> str:
    """What a counter grows by a second, over all replicas or for each value of labels."""
    return f"{_sum(by)}(rate({series(name)}[{WINDOW}]))"


def ratio(part: str, whole: str, by: str = "") -> str:
    """One counter's growth over another's."""
    return f"{rate(part, by)} / {rate(whole, by)}"


def mean(histogram: str) -> str:
    """What an observation was on average."""
    return ratio(f"{histogram}_sum", f"{histogram}_count")


def quantile(share: float, histogram: str) -> str:
    """What so many of the observations did not exceed."""
    return f"histogram_quantile({share:g}, {rate(f'{histogram}_bucket', 'le')})"


def quantiles(histogram: str) -> tuple[Query, ...]:
    """Median, 95th and 99th percentile."""
    shares = ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
    return tuple(Query(quantile(share, histogram), legend) for share, legend in shares)


def _sum(by: str) -> str:
    return f"sum by ({by}) " if by else "sum"
