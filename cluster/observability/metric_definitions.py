"""Every metric of the service: those of each replica's engine, of replicas, and of the fleet.

Names, types and labels are vLLM's where it has the metric, behind a prefix of our own, so that its
dashboards work once the prefix is replaced. docs/metrics.md lists them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from specdec.engine.metric_definitions import ENGINE_METRICS, EngineReport, MetricSpec, Reading, one
from specdec.types.counters import Counts
from specdec.types.fleet import FleetStatistics, ReplicaReport, ReplicaStatus

REPLICA_LABEL = "replica"


@dataclass(frozen=True)
class FleetView:
    """The fleet at one moment. num_expected: replicas that there have to be at any load."""

    fleet: FleetStatistics
    num_expected: int


@dataclass(frozen=True)
class LinkView:
    """A Router's line to the ControlPlane."""

    is_connected: bool


def _of_engine(spec: MetricSpec[EngineReport]) -> MetricSpec[ReplicaStatus]:
    """The same, of a replica's engine."""
    return MetricSpec(
        spec.name, spec.type, spec.meaning, lambda status: spec.read(status.report), spec.labels
    )


def _gauge(
    name: str, meaning: str, read: Callable[[ReplicaReport], float | None]
) -> MetricSpec[ReplicaStatus]:
    return MetricSpec(name, "gauge", meaning, lambda status: one(read(status.report)))


def _counter(name: str, meaning: str, read: Callable[[Counts], float]) -> MetricSpec[ReplicaStatus]:
    return MetricSpec(name, "counter", meaning, lambda status: one(read(status.report.counts)))


def _failures(status: ReplicaStatus) -> tuple[Reading, ...]:
    failed: Mapping[str, int] = status.report.counts.failed
    return tuple(Reading(count, (code,)) for code, count in failed.items())


REPLICA_METRICS: tuple[MetricSpec[ReplicaStatus], ...] = (
    *map(_of_engine, ENGINE_METRICS),
    MetricSpec(
        "request_failure",
        "counter",
        "Calls that ended in an error, by gRPC status code.",
        _failures,
        ("code",),
    ),
    _gauge(
        "speculation_control_version",
        "Version of the state that operators have set, as the replica goes by it.",
        lambda r: r.speculation_version,
    ),
    # What can break.
    _gauge("replica_ready", "1 while the replica answers requests, else 0.", lambda r: r.is_ready),
    _gauge(
        "draft_worker_up",
        "1 while the draft model has a worker, else 0.",
        lambda r: r.is_draft_worker_up,
    ),
    _counter(
        "draft_worker_restarts",
        "Times that the draft model was made again.",
        lambda c: c.num_draft_restarts,
    ),
    _counter(
        "target_restarts", "Times that the target was made again.", lambda c: c.num_target_restarts
    ),
    MetricSpec(
        "replica_uptime_seconds",
        "gauge",
        "Since the replica's process began to serve.",
        lambda status: one(status.uptime_s),
    ),
    MetricSpec(
        "replica_report_age_seconds",
        "gauge",
        "Since the replica's report from which all this is.",
        lambda status: one(status.age_s),
    ),
)

FLEET_METRICS: tuple[MetricSpec[FleetView], ...] = (
    MetricSpec(
        "fleet_replicas_ready",
        "gauge",
        "Replicas that answer requests.",
        lambda view: one(sum(each.report.is_ready for each in view.fleet.status.replicas)),
    ),
    MetricSpec(
        "fleet_replicas_expected",
        "gauge",
        "Replicas that there have to be at any load.",
        lambda view: one(view.num_expected),
    ),
    MetricSpec(
        "fleet_replicas_lost",
        "counter",
        "Replicas that failed or fell silent since the control plane started.",
        lambda view: one(view.fleet.status.num_lost_replicas),
    ),
    MetricSpec(
        "fleet_requests_per_second",
        "gauge",
        "Requests that arrived a second, of the last ten seconds; rules go by it.",
        lambda view: one(view.fleet.requests_per_s),
    ),
    MetricSpec(
        "fleet_control_version",
        "gauge",
        "Version of the state that operators have set.",
        lambda view: one(view.fleet.status.speculation.version),
    ),
)

LINK_METRICS: tuple[MetricSpec[LinkView], ...] = (
    MetricSpec(
        "control_plane_up",
        "gauge",
        "1 while the control plane answers this replica, else 0.",
        lambda view: one(view.is_connected),
    ),
)
