"""Reports of replicas, and the status and statistics of all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from specdec.types.control import SpeculationState
from specdec.types.reports.stats import Counts, EngineReport

DRAINING = "it is draining"
"""The `reason` of a replica that ends: it completes its requests and gets no others."""
LOADING = "the model is loading"
"""The `reason` of a replica that starts: it has no requests yet."""


@dataclass(frozen=True)
class DecisionNews:
    """A change of a replica's decision, in wall-clock time. See `types.drafts.draft_decision`."""

    at: datetime
    num_draft_tokens: int
    reason: str
    num_decoding: int


@dataclass(frozen=True)
class MemoryUse:
    """Memory of a replica's processes, of its node and of its GPUs.

    process_bytes: resident, of the Router and of the ranks on its node. node_bytes and
    node_used_bytes: of the machine or of the control group, the smaller one. gpu_bytes and
    gpu_used_bytes: of the GPUs of those ranks, by all processes; 0 without a GPU.
    """

    process_bytes: int
    node_bytes: int
    node_used_bytes: int
    gpu_bytes: int = 0
    gpu_used_bytes: int = 0


@dataclass(frozen=True)
class ReplicaReport(EngineReport):
    """The state of a replica, as it reports it.

    Fields with the names of EngineStats have the same meaning.

    reason: why it is not ready; empty if it is. speculation_version: of the settings in force; None
    before the first. decision_reason: empty before the first decision.
    is_draft_worker_up: None without a draft model. memory: None before it was read; a report that
    differs in nothing else is no news.
    """

    replica_id: str
    is_ready: bool
    reason: str = ""
    kv_cache_usage: float = 0.0
    speculation_version: int | None = None
    num_chosen_tokens: int = 0
    decision_reason: str = ""
    decision_changes: tuple[DecisionNews, ...] = ()
    is_draft_worker_up: bool | None = None
    memory: MemoryUse | None = field(default=None, compare=False)


@dataclass(frozen=True)
class ReplicaStatus:
    """A replica as it last reported, `age_s` seconds ago."""

    report: ReplicaReport
    uptime_s: float
    age_s: float


@dataclass(frozen=True)
class ServiceStatus:
    """The status of a service.

    replicas: those with a recent report, longest-running first. num_lost_replicas: those that
    failed or stopped reporting since the control plane started.
    """

    replicas: tuple[ReplicaStatus, ...]
    speculation: SpeculationState
    num_lost_replicas: int


@dataclass(frozen=True)
class FleetStatistics:
    """The service at one moment.

    requests_per_s: arrivals over all replicas and the last ten seconds. totals: since the control
    plane started, ended replicas included. replicas_needed: for the objective; None without one, or
    while it is unknown.
    """

    at: datetime
    status: ServiceStatus
    requests_per_s: float
    totals: Counts
    replicas_needed: int | None = None
