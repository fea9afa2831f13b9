"""Between AdminService's protos and the types of this service, in both directions."""

from __future__ import annotations

from google.protobuf.timestamp_pb2 import Timestamp

from cluster.proto_fields import present_fields
from protos.specdec.v1 import admin_pb2 as pb
from specdec.client import ReplicaStatus, ServiceStatus, SpeculationChange, SpeculationState
from specdec.speculation import SPECULATION_MODES, SpeculationControl

_MODE_SPELLINGS = {name: f"SPECULATION_MODE_{name.upper()}" for name in SPECULATION_MODES}
_MODES = {pb.SpeculationMode.Value(text): name for name, text in _MODE_SPELLINGS.items()}


def decode_change(request: pb.SetSpeculationRequest) -> SpeculationChange:
    """Reads a change. Raises InvalidValueError."""
    values = present_fields(request, "threshold", "num_speculative_tokens", "expected_version")
    if request.mode != pb.SPECULATION_MODE_UNSPECIFIED:
        # A number that has no name here is handed on, for SpeculationChange to refuse.
        values["mode"] = _MODES.get(request.mode, request.mode)
    return SpeculationChange(
        reset=request.reset, updated_by=request.updated_by, reason=request.reason, **values
    )


def encode_state(state: SpeculationState) -> pb.SpeculationState:
    """What is wanted of speculation."""
    updated_at = None
    if state.updated_at is not None:
        updated_at = Timestamp()
        updated_at.FromDatetime(state.updated_at)
    return pb.SpeculationState(
        in_force=_encode_values(state.in_force),
        configured=_encode_values(state.configured),
        overridden=state.overridden,
        version=state.version,
        updated_at=updated_at,
        updated_by=state.updated_by,
        reason=state.reason,
    )


def encode_status(status: ServiceStatus) -> pb.GetStatusResponse:
    """How the service runs."""
    return pb.GetStatusResponse(
        replicas=[_encode_replica(replica) for replica in status.replicas],
        speculation=encode_state(status.speculation),
        num_lost_replicas=status.num_lost_replicas,
    )


def _encode_values(control: SpeculationControl) -> pb.SpeculationValues:
    return pb.SpeculationValues(
        mode=_MODE_SPELLINGS[control.mode],
        threshold=control.threshold,
        num_speculative_tokens=control.num_speculative_tokens,
    )


def _encode_replica(replica: ReplicaStatus) -> pb.ReplicaStatus:
    report = replica.report
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
        num_generated_tokens=report.num_generated_tokens,
        num_drafts=report.speculation.num_drafts,
        num_draft_tokens=report.speculation.num_draft_tokens,
        num_accepted_tokens=report.speculation.num_accepted_tokens,
        uptime_s=replica.uptime_s,
        age_s=replica.age_s,
    )
