"""What replicas report of themselves, and what it comes to over all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from specdec.types.control_changes import SpeculationState
from specdec.types.counters import Counts


@dataclass(frozen=True)
class DecisionNews:
    """A change of a replica's decision, by the clock of the wall. See specdec.types.draft_decision."""

    at: datetime
    num_draft_tokens: int
    reason: str
    num_decoding: int


@dataclass(frozen=True)
class ReplicaReport:
    """What a replica says of itself.

    reason: why it is not ready; empty where it is. num_decoding: what the threshold is compared
    with. kv_cache_usage: share of the blocks taken, 0 to 1. is_speculation_on: whether a request
    that says nothing about it gets drafts now. speculation_version: of the state that it goes by;
    None before it has heard of one. num_chosen_tokens, decision_reason: how many tokens a sequence
    drafts a step, and why; empty before the first decision. decision_changes: the latest, the
    oldest first. counts: since it started. estimated_speedup: over no drafts, at the present batch;
    None where no costs are known; estimated_tokens_per_s: of that batch. mode: in force, with the
    rule that holds; empty where nothing can draft. is_draft_worker_up: None without a draft model.
    """

    replica_id: str
    is_ready: bool
    reason: str = ""
    num_running: int = 0
    num_waiting: int = 0
    num_decoding: int = 0
    kv_cache_usage: float = 0.0
    is_speculation_on: bool = False
    speculation_version: int | None = None
    num_chosen_tokens: int = 0
    decision_reason: str = ""
    decision_changes: tuple[DecisionNews, ...] = ()
    counts: Counts = field(default_factory=Counts)
    estimated_speedup: float | None = None
    estimated_tokens_per_s: float | None = None
    mode: str = ""
    is_draft_worker_up: bool | None = None


@dataclass(frozen=True)
class ReplicaStatus:
    """A replica as it last reported, `age_s` seconds ago."""

    report: ReplicaReport
    uptime_s: float
    age_s: float


@dataclass(frozen=True)
class ServiceStatus:
    """How the service runs.

    replicas: those heard of lately, the longest-running first. num_lost_replicas: those that failed
    or fell silent since the control plane started.
    """

    replicas: tuple[ReplicaStatus, ...]
    speculation: SpeculationState
    num_lost_replicas: int


@dataclass(frozen=True)
class FleetStatistics:
    """The service at one moment.

    requests_per_s: arrivals over all replicas and the last ten seconds. totals: since the control
    plane started, of the replicas that have ended too.
    """

    at: datetime
    status: ServiceStatus
    requests_per_s: float
    totals: Counts
