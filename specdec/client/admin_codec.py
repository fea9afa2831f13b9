"""Between the operators' types and the protos. Encoding raises InvalidValueError."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC
from types import MappingProxyType
from typing import Any, cast

from protos.specdec.v1 import admin_pb2 as pb
from specdec.client.proto_fields import present_fields
from specdec.types.control import (
    SPECULATION_MODES,
    SpeculationControl,
    SpeculationMode,
    SpeculationRule,
)
from specdec.types.control_changes import AuditEntry, AuditPage, SpeculationChange, SpeculationState
from specdec.types.counters import Counts, HistogramCounts
from specdec.types.errors import InvalidValueError
from specdec.types.fleet import (
    DecisionNews,
    FleetStatistics,
    ReplicaReport,
    ReplicaStatus,
    ServiceStatus,
)
from specdec.types.profile import OperationTime, ProfileOrder, ProfileReport, WorkerProfile
from specdec.types.sampling_params import VerifierName
from specdec.types.stats import SpeculationStats

_MODES: Mapping[int, SpeculationMode] = MappingProxyType(
    {
        pb.SpeculationMode.Value(f"SPECULATION_MODE_{name.upper()}"): name
        for name in SPECULATION_MODES
    }
)
_INT64_LIMIT = 2**63


def encode_change(change: SpeculationChange) -> pb.SetSpeculationRequest:
    """The request for a change; what is None stays unset."""
    version, verifiers, rules = change.expected_version, change.allowed_verifiers, change.rules
    if version is not None and not -_INT64_LIMIT <= version < _INT64_LIMIT:
        raise InvalidValueError("expected_version", version, "a number of 64 bits")
    return pb.SetSpeculationRequest(
        mode=_spelling(change.mode),
        threshold=change.threshold,
        num_speculative_tokens=change.num_speculative_tokens,
        method=change.method or "",
        allow_request_override=change.allow_request_override,
        allowed_verifiers=None if verifiers is None else pb.VerifierNames(names=verifiers),
        rules=None if rules is None else pb.SpeculationRules(rules=map(_encode_rule, rules)),
        ttl_s=change.ttl_s,
        reset=change.reset,
        expected_version=version,
        updated_by=change.updated_by,
        reason=change.reason,
    )


def decode_state(state: pb.SpeculationState) -> SpeculationState:
    """Reads what is wanted of speculation."""
    active = state.active_rule if state.HasField("active_rule") else None
    in_force = _decode_values(state.in_force, is_by_rule=active is not None)
    return SpeculationState(
        in_force=in_force,
        without_rules=_decode_values(state.without_rules),
        configured=_decode_values(state.configured),
        overridden=tuple(state.overridden),
        version=state.version,
        updated_at=state.updated_at.ToDatetime(UTC) if state.HasField("updated_at") else None,
        updated_by=state.updated_by,
        reason=state.reason,
        rules=tuple(map(_decode_rule, state.rules)),
        active_rule=active,
        expires_at=state.expires_at.ToDatetime(UTC) if state.HasField("expires_at") else None,
    )


def decode_status(response: pb.GetStatusResponse) -> ServiceStatus:
    """Reads how the service runs."""
    return ServiceStatus(
        replicas=tuple(decode_replica(replica) for replica in response.replicas),
        speculation=decode_state(response.speculation),
        num_lost_replicas=response.num_lost_replicas,
    )


def decode_audit_page(response: pb.ListAuditLogResponse) -> AuditPage:
    """Reads a page of changes."""
    entries = tuple(
        AuditEntry(
            entry.version,
            entry.at.ToDatetime(UTC),
            entry.updated_by,
            entry.reason,
            json.loads(entry.change_json),
        )
        for entry in response.entries
    )
    return AuditPage(entries, response.next_page_token)


def decode_fleet(response: pb.WatchStatsResponse) -> FleetStatistics:
    """Reads the service at one moment."""
    return FleetStatistics(
        at=response.at.ToDatetime(UTC),
        status=decode_status(response.status),
        requests_per_s=response.requests_per_s,
        totals=_decode_counts(response.totals),
    )


def encode_profile_order(order: ProfileOrder) -> pb.ProfileRequest:
    """The request for a profile."""
    return pb.ProfileRequest(
        num_steps=order.num_steps, timeout_s=order.timeout_s, replica_id=order.replica_id
    )


def decode_profile(response: pb.ProfileResponse) -> ProfileReport:
    """Reads what the models of a replica did."""
    workers = tuple(map(_decode_worker, response.workers))
    return ProfileReport(response.replica_id, response.elapsed_s, workers)


def _decode_worker(worker: pb.WorkerProfile) -> WorkerProfile:
    operations = tuple(
        OperationTime(each.name, each.num_calls, each.self_ms, each.total_ms, each.device_ms)
        for each in worker.operations
    )
    return WorkerProfile(
        worker.worker,
        worker.rank,
        worker.num_steps,
        worker.trace_path,
        worker.trace_bytes,
        operations,
        worker.fault,
    )


def decode_replica(replica: pb.ReplicaStatus) -> ReplicaStatus:
    """Reads a replica as it last reported."""
    optional = (
        "speculation_version",
        "estimated_speedup",
        "estimated_tokens_per_s",
        "is_draft_worker_up",
    )
    report = ReplicaReport(
        replica_id=replica.replica_id,
        is_ready=replica.is_ready,
        reason=replica.reason,
        num_running=replica.num_running,
        num_waiting=replica.num_waiting,
        num_decoding=replica.num_decoding,
        kv_cache_usage=replica.kv_cache_usage,
        is_speculation_on=replica.is_speculation_on,
        num_chosen_tokens=replica.num_chosen_tokens,
        decision_reason=replica.decision_reason,
        decision_changes=tuple(
            DecisionNews(
                each.at.ToDatetime(UTC), each.num_draft_tokens, each.reason, each.num_decoding
            )
            for each in replica.decision_changes
        ),
        counts=_decode_counts(replica),
        mode=replica.mode,
        **present_fields(replica, *optional),
    )
    return ReplicaStatus(report, replica.uptime_s, replica.age_s)


def _decode_counts(counts: pb.ReplicaStatus | pb.FleetTotals) -> Counts:
    return Counts(
        num_requests=counts.num_requests,
        num_prompt_tokens=counts.num_prompt_tokens,
        num_generated_tokens=counts.num_generated_tokens,
        num_steps=counts.num_steps,
        speculation=SpeculationStats(
            num_drafts=counts.num_drafts,
            num_draft_tokens=counts.num_draft_tokens,
            num_accepted_tokens=counts.num_accepted_tokens,
        ),
        accepted_by_position=tuple(counts.accepted_by_position),
        drafted_by_position=tuple(counts.drafted_by_position),
        decisions=dict(counts.decisions),
        histograms={
            name: HistogramCounts(tuple(each.bounds), tuple(each.counts), each.total)
            for name, each in counts.histograms.items()
        },
    )


def _decode_values(values: pb.SpeculationValues, *, is_by_rule: bool = False) -> SpeculationControl:
    return SpeculationControl(
        mode=_MODES[values.mode],
        threshold=values.threshold,
        num_speculative_tokens=values.num_speculative_tokens,
        method=values.method if values.method else None,
        allow_request_override=values.allow_request_override,
        allowed_verifiers=cast("tuple[VerifierName, ...]", tuple(values.allowed_verifiers)),
        is_by_rule=is_by_rule,
    )


def _spelling(mode: SpeculationMode | None) -> Any:
    return None if mode is None else f"SPECULATION_MODE_{mode.upper()}"


def _encode_rule(rule: SpeculationRule) -> pb.SpeculationRule:
    return pb.SpeculationRule(
        min_requests_per_s=rule.min_requests_per_s,
        mode=_spelling(rule.mode),
        num_speculative_tokens=rule.num_speculative_tokens,
    )


def _decode_rule(rule: pb.SpeculationRule) -> SpeculationRule:
    count = rule.num_speculative_tokens if rule.HasField("num_speculative_tokens") else None
    return SpeculationRule(rule.min_requests_per_s, _MODES.get(rule.mode), count)
