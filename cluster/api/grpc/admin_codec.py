"""Between AdminService's protos and the types of this service, in both directions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from protos.specdec.v1 import admin_pb2 as pb
from specdec.client.proto_fields import present_fields
from specdec.types.control import SPECULATION_MODES, SpeculationControl, SpeculationRule
from specdec.types.control_changes import AuditPage, SpeculationChange, SpeculationState
from specdec.types.counters import Counts, HistogramCounts
from specdec.types.fleet import FleetStatistics, ReplicaStatus, ServiceStatus
from specdec.types.profile import (
    DEFAULT_PROFILE_STEPS,
    DEFAULT_PROFILE_TIMEOUT_S,
    ProfileOrder,
    ProfileReport,
    WorkerProfile,
)

_MODE_SPELLINGS = {name: f"SPECULATION_MODE_{name.upper()}" for name in SPECULATION_MODES}
_MODES = {pb.SpeculationMode.Value(text): name for name, text in _MODE_SPELLINGS.items()}


def decode_change(request: pb.SetSpeculationRequest) -> SpeculationChange:
    """Reads a change. Raises InvalidValueError."""
    values = present_fields(
        request,
        "threshold",
        "num_speculative_tokens",
        "expected_version",
        "allow_request_override",
        "ttl_s",
    )
    values |= _given_mode(request.mode)
    if request.method:
        values["method"] = request.method
    if request.HasField("allowed_verifiers"):
        values["allowed_verifiers"] = tuple(request.allowed_verifiers.names)
    if request.HasField("rules"):
        values["rules"] = tuple(_decode_rule(rule) for rule in request.rules.rules)
    return SpeculationChange(
        reset=request.reset, updated_by=request.updated_by, reason=request.reason, **values
    )


def encode_state(state: SpeculationState) -> pb.SpeculationState:
    """What is wanted of speculation."""
    return pb.SpeculationState(
        in_force=_encode_values(state.in_force),
        without_rules=_encode_values(state.without_rules),
        configured=_encode_values(state.configured),
        overridden=state.overridden,
        version=state.version,
        updated_at=None if state.updated_at is None else _timestamp(state.updated_at),
        updated_by=state.updated_by,
        reason=state.reason,
        rules=[_encode_rule(rule) for rule in state.rules],
        active_rule=state.active_rule,
        expires_at=None if state.expires_at is None else _timestamp(state.expires_at),
    )


def encode_status(status: ServiceStatus) -> pb.GetStatusResponse:
    """How the service runs."""
    return pb.GetStatusResponse(
        replicas=[encode_replica(replica) for replica in status.replicas],
        speculation=encode_state(status.speculation),
        num_lost_replicas=status.num_lost_replicas,
    )


def encode_audit_page(page: AuditPage) -> pb.ListAuditLogResponse:
    """A page of changes."""
    entries = [
        pb.AuditEntry(
            version=entry.version,
            at=_timestamp(entry.at),
            updated_by=entry.updated_by,
            reason=entry.reason,
            change_json=json.dumps(dict(entry.change), ensure_ascii=False),
        )
        for entry in page.entries
    ]
    return pb.ListAuditLogResponse(entries=entries, next_page_token=page.next_page_token)


def encode_fleet(fleet: FleetStatistics) -> pb.WatchStatsResponse:
    """The service at one moment."""
    return pb.WatchStatsResponse(
        at=_timestamp(fleet.at),
        status=encode_status(fleet.status),
        requests_per_s=fleet.requests_per_s,
        totals=_encode_totals(fleet.totals),
    )


def decode_profile_order(request: pb.ProfileRequest) -> ProfileOrder:
    """Reads what to profile. Raises InvalidValueError."""
    return ProfileOrder(
        request.num_steps or DEFAULT_PROFILE_STEPS,
        request.timeout_s or DEFAULT_PROFILE_TIMEOUT_S,
        request.replica_id,
    )


def encode_profile(report: ProfileReport) -> pb.ProfileResponse:
    """What the models of a replica did."""
    return pb.ProfileResponse(
        replica_id=report.replica_id,
        elapsed_s=report.elapsed_s,
        workers=map(_encode_worker, report.workers),
    )


def _encode_worker(worker: WorkerProfile) -> pb.WorkerProfile:
    return pb.WorkerProfile(
        worker=worker.worker,
        rank=worker.rank,
        num_steps=worker.num_steps,
        trace_path=worker.trace_path,
        trace_bytes=worker.trace_bytes,
        operations=[
            pb.OperationTime(
                name=each.name,
                num_calls=each.num_calls,
                self_ms=each.self_ms,
                total_ms=each.total_ms,
                device_ms=each.device_ms,
            )
            for each in worker.operations
        ],
        fault=worker.fault,
    )


def encode_replica(replica: ReplicaStatus) -> pb.ReplicaStatus:
    """A replica as it last reported."""
    report, counts = replica.report, replica.report.counts
    return pb.ReplicaStatus(
        replica_id=report.replica_id,
        is_ready=report.is_ready,
        reason=report.reason,
        num_running=report.num_running,
        num_waiting=report.num_waiting,
        num_decoding=report.num_decoding,
        kv_cache_usage=report.kv_cache_usage,
        is_speculation_on=report.is_speculation_on,
        speculation_version=report.speculation_version,
        num_generated_tokens=counts.num_generated_tokens,
        num_drafts=counts.speculation.num_drafts,
        num_draft_tokens=counts.speculation.num_draft_tokens,
        num_accepted_tokens=counts.speculation.num_accepted_tokens,
        uptime_s=replica.uptime_s,
        age_s=replica.age_s,
        num_requests=counts.num_requests,
        num_chosen_tokens=report.num_chosen_tokens,
        estimated_speedup=report.estimated_speedup,
        estimated_tokens_per_s=report.estimated_tokens_per_s,
        mode=report.mode,
        is_draft_worker_up=report.is_draft_worker_up,
        decision_reason=report.decision_reason,
        decisions=counts.decisions,
        decision_changes=[
            pb.DecisionChange(
                at=_timestamp(change.at),
                num_draft_tokens=change.num_draft_tokens,
                reason=change.reason,
                num_decoding=change.num_decoding,
            )
            for change in report.decision_changes
        ],
        accepted_by_position=counts.accepted_by_position,
        drafted_by_position=counts.drafted_by_position,
        num_prompt_tokens=counts.num_prompt_tokens,
        num_steps=counts.num_steps,
        histograms=_encode_histograms(counts.histograms),
    )


def _encode_totals(counts: Counts) -> pb.FleetTotals:
    return pb.FleetTotals(
        num_requests=counts.num_requests,
        num_prompt_tokens=counts.num_prompt_tokens,
        num_generated_tokens=counts.num_generated_tokens,
        num_steps=counts.num_steps,
        num_drafts=counts.speculation.num_drafts,
        num_draft_tokens=counts.speculation.num_draft_tokens,
        num_accepted_tokens=counts.speculation.num_accepted_tokens,
        accepted_by_position=counts.accepted_by_position,
        drafted_by_position=counts.drafted_by_position,
        decisions=counts.decisions,
        histograms=_encode_histograms(counts.histograms),
    )


def _encode_histograms(histograms: Mapping[str, HistogramCounts]) -> dict[str, pb.Histogram]:
    return {
        name: pb.Histogram(bounds=each.bounds, counts=each.counts, total=each.total)
        for name, each in histograms.items()
    }


def _encode_values(control: SpeculationControl) -> pb.SpeculationValues:
    return pb.SpeculationValues(
        mode=_MODE_SPELLINGS[control.mode],
        threshold=control.threshold,
        num_speculative_tokens=control.num_speculative_tokens,
        method=control.method or "",
        allow_request_override=control.allow_request_override,
        allowed_verifiers=control.allowed_verifiers,
    )


def _encode_rule(rule: SpeculationRule) -> pb.SpeculationRule:
    return pb.SpeculationRule(
        min_requests_per_s=rule.min_requests_per_s,
        mode=None if rule.mode is None else _MODE_SPELLINGS[rule.mode],
        num_speculative_tokens=rule.num_speculative_tokens,
    )


def _decode_rule(rule: pb.SpeculationRule) -> SpeculationRule:
    values = present_fields(rule, "num_speculative_tokens") | _given_mode(rule.mode)
    return SpeculationRule(rule.min_requests_per_s, **values)


def _given_mode(mode: int) -> dict[str, Any]:
    """A number that has no name here is handed on, for the type that it becomes to refuse."""
    if mode == pb.SPECULATION_MODE_UNSPECIFIED:
        return {}
    return {"mode": _MODES.get(mode, mode)}


def _timestamp(moment: datetime) -> Timestamp:
    stamp = Timestamp()
    stamp.FromDatetime(moment)
    return stamp
