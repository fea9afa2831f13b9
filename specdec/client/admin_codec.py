"""Between the operators' types and the protos. Encoding raises InvalidValueError."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC
from types import MappingProxyType

from protos.specdec.v1 import admin_pb2 as pb
from specdec.client.admin_messages import (
    ReplicaReport,
    ReplicaStatus,
    ServiceStatus,
    SpeculationChange,
    SpeculationState,
)
from specdec.errors import InvalidValueError
from specdec.speculation import SPECULATION_MODES, SpeculationControl, SpeculationMode
from specdec.stats import SpeculationStats

_MODES: Mapping[int, SpeculationMode] = MappingProxyType(
    {
        pb.SpeculationMode.Value(f"SPECULATION_MODE_{name.upper()}"): name
        for name in SPECULATION_MODES
    }
)
_INT64_LIMIT = 2**63


def encode_change(change: SpeculationChange) -> pb.SetSpeculationRequest:
    """The request for a change; what is None stays unset."""
    version = change.expected_version
    if version is not None and not -_INT64_LIMIT <= version < _INT64_LIMIT:
        raise InvalidValueError("expected_version", version, "a number of 64 bits")
    return pb.SetSpeculationRequest(
        mode=None if change.mode is None else f"SPECULATION_MODE_{change.mode.upper()}",
        threshold=change.threshold,
        num_speculative_tokens=change.num_speculative_tokens,
        reset=change.reset,
        expected_version=version,
        updated_by=change.updated_by,
        reason=change.reason,
    )


def decode_state(state: pb.SpeculationState) -> SpeculationState:
    """Reads what is wanted of speculation."""
    return SpeculationState(
        in_force=_decode_values(state.in_force),
        configured=_decode_values(state.configured),
        overridden=tuple(state.overridden),
        version=state.version,
        updated_at=state.updated_at.ToDatetime(UTC) if state.HasField("updated_at") else None,
        updated_by=state.updated_by,
        reason=state.reason,
    )


def decode_status(response: pb.GetStatusResponse) -> ServiceStatus:
    """Reads how the service runs."""
    return ServiceStatus(
        replicas=tuple(_decode_replica(replica) for replica in response.replicas),
        speculation=decode_state(response.speculation),
        num_lost_replicas=response.num_lost_replicas,
    )


def _decode_values(values: pb.SpeculationValues) -> SpeculationControl:
    return SpeculationControl(_MODES[values.mode], values.threshold, values.num_speculative_tokens)


def _decode_replica(replica: pb.ReplicaStatus) -> ReplicaStatus:
    has_version = replica.HasField("speculation_version")
    report = ReplicaReport(
        replica_id=replica.replica_id,
        is_ready=replica.is_ready,
        reason=replica.reason,
        num_running=replica.num_running,
        num_waiting=replica.num_waiting,
        num_decoding=replica.num_decoding,
        kv_cache_usage=replica.kv_cache_usage,
        is_speculation_on=replica.is_speculation_on,
        speculation_version=replica.speculation_version if has_version else None,
        num_generated_tokens=replica.num_generated_tokens,
        speculation=SpeculationStats(
            num_drafts=replica.num_drafts,
            num_draft_tokens=replica.num_draft_tokens,
            num_accepted_tokens=replica.num_accepted_tokens,
        ),
    )
    return ReplicaStatus(report, replica.uptime_s, replica.age_s)
