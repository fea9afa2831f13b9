"""Definitions of every metric of the service: of engines, replicas and the fleet.

Names, types and labels are vLLM's where it has the metric, with our own prefix, so that its
dashboards work once the prefix is replaced. docs/metrics.md lists them all.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.engine.metrics.metric_definitions import (
    ENGINE_METRICS,
    MetricSpec,
    Reading,
    counter,
    counters,
    gauge,
)
from specdec.types.reports.fleet import FleetStatistics, ReplicaStatus
from specdec.types.reports.stats import EngineReport

REPLICA_LABEL = "replica"


@dataclass(frozen=True)
class FleetView:
    """The fleet at one moment. num_expected: the minimum number of replicas."""

    fleet: FleetStatistics
    num_expected: int


def _of_report(spec: MetricSpec[EngineReport]) -> MetricSpec[ReplicaStatus]:
    """Read a metric of a report from the replica's status."""
    return MetricSpec(
        spec.name, spec.type, spec.meaning, lambda status: spec.read(status.report), spec.labels
    )


def _memory(name: str, meaning: str, field: str) -> MetricSpec[ReplicaStatus]:
    """Read a metric of a replica's memory; no series where it is not known."""
    return gauge(name, meaning, lambda status: getattr(status.report.memory, field, None))


REPLICA_METRICS: tuple[MetricSpec[ReplicaStatus], ...] = (
    *map(_of_report, ENGINE_METRICS),
    _of_report(
        counters(
            "request_failure",
            "Calls that ended in an error, by gRPC status code.",
            "code",
            "failed",
        )
    ),
    gauge(
        "speculation_control_version",
        "Version of the operators' settings that the replica applies.",
        "report.speculation_version",
    ),
    # Failures.
    gauge("replica_ready", "1 while the replica answers requests, else 0.", "report.is_ready"),
    gauge(
        "draft_worker_up",
        "1 while the draft model has a worker, else 0.",
        "report.is_draft_worker_up",
    ),
    _of_report(
        counter("draft_worker_restarts", "Restarts of the draft model.", "num_draft_restarts")
    ),
    _of_report(counter("draft_worker_moves", "Moves to other draft workers.", "num_draft_moves")),
    _of_report(counter("target_restarts", "Restarts of the target.", "num_target_restarts")),
    # Memory.
    _memory("replica_resident_memory_bytes", "Of the Router and the ranks.", "process_bytes"),
    _memory("node_memory_bytes", "Of the replica's node or control group.", "node_bytes"),
    _memory("node_memory_used_bytes", "The part of it in use.", "node_used_bytes"),
    _memory("gpu_memory_bytes", "Of the replica's GPUs.", "gpu_bytes"),
    _memory("gpu_memory_used_bytes", "The part of it in use.", "gpu_used_bytes"),
    gauge("replica_uptime_seconds", "Since the replica began to serve.", "uptime_s"),
    gauge(
        "replica_report_age_seconds",
        "Age of the replica's report from which these metrics are.",
        "age_s",
    ),
)

FLEET_METRICS: tuple[MetricSpec[FleetView], ...] = (
    gauge(
        "fleet_replicas_ready",
        "Replicas that answer requests.",
        lambda view: sum(each.report.is_ready for each in view.fleet.status.replicas),
    ),
    gauge("fleet_replicas_expected", "Minimum number of replicas.", "num_expected"),
    gauge("fleet_replicas_needed", "Replicas needed for the objective.", "fleet.replicas_needed"),
    MetricSpec(
        "fleet_replicas_lost",
        "counter",
        "Replicas that failed or stopped reporting since the control plane started.",
        lambda view: (Reading(view.fleet.status.num_lost_replicas),),
    ),
    gauge(
        "fleet_requests_per_second",
        "Requests per second over the last ten seconds, by which rules are chosen.",
        "fleet.requests_per_s",
    ),
    gauge(
        "fleet_control_version",
        "Version of the operators' settings.",
        "fleet.status.speculation.version",
    ),
)

CONNECTION_METRICS: tuple[MetricSpec[bool], ...] = (
    gauge(
        "control_plane_up",
        "1 while the control plane answers this replica, else 0.",
        lambda is_connected: is_connected,
    ),
)
