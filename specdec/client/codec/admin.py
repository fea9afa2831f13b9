"""Codecs of AdminService's messages."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from protos.specdec.v1 import admin_pb2 as pb
from specdec.client.codec.message import Converter, MessageCodec, Options
from specdec.types.adapters import AdapterInfo, AdapterOrder, AdapterReport, AdapterState
from specdec.types.control import (
    AuditEntry,
    AuditPage,
    RateRule,
    SpeculationChange,
    SpeculationControl,
    SpeculationState,
)
from specdec.types.drafters import DrafterOrder, DrafterReport, DrafterVersion, VersionState
from specdec.types.reports.fleet import (
    DecisionNews,
    FleetStatistics,
    ReplicaReport,
    ReplicaStatus,
    ServiceStatus,
)
from specdec.types.reports.profile import OperationTime, ProfileOrder, ProfileReport, WorkerProfile
from specdec.types.reports.stats import Counts, HistogramCounts, SpeculationStats
from specdec.types.samples import SampleBatch, SampleOrder, ServedSample


class _StateCodec(MessageCodec[pb.SpeculationState, SpeculationState]):
    """Codec that derives `is_by_rule`, which is not sent, from the active rule."""

    def decode(self, message: pb.SpeculationState, **given: Any) -> SpeculationState:
        state = super().decode(message, **given)
        if state.active_rule is None:
            return state
        is_by_rule = state.rules[state.active_rule].mode is not None
        return replace(state, in_force=replace(state.in_force, is_by_rule=is_by_rule))


def _counts(message_type: Any) -> MessageCodec[Any, Counts]:
    """Return the codec of counters that are fields of a larger message."""
    parts: dict[str, MessageCodec[Any, Any]] = {
        "speculation": MessageCodec(message_type, SpeculationStats),
        "histograms": MessageCodec(pb.Histogram, HistogramCounts),
    }
    return MessageCodec(message_type, Counts, Options(parts))


_RULE = MessageCodec(pb.SpeculationRule, RateRule)
_VALUES = MessageCodec(pb.SpeculationValues, SpeculationControl)
_ENTRY = MessageCodec(
    pb.AuditEntry,
    AuditEntry,
    Options(
        renamed={"change_json": "change"},
        converters={
            "change_json": Converter(
                lambda change: json.dumps(dict(change), ensure_ascii=False), json.loads
            )
        },
    ),
)
_REPORT = MessageCodec(
    pb.ReplicaStatus,
    ReplicaReport,
    Options(
        {
            "counts": _counts(pb.ReplicaStatus),
            "decision_changes": MessageCodec(pb.DecisionChange, DecisionNews),
        }
    ),
)
UNSENT: Mapping[type, Collection[str]] = {
    Counts: _counts(pb.ReplicaStatus).unsent,
    ReplicaReport: _REPORT.unsent,
}
"""Attributes that are exported over HTTP only: after decoding they have their defaults."""
_WORKER = MessageCodec(
    pb.WorkerProfile,
    WorkerProfile,
    Options({"operations": MessageCodec(pb.OperationTime, OperationTime)}),
)
_VERSION = MessageCodec(
    pb.DrafterVersion,
    DrafterVersion,
    Options(
        {"speculation": MessageCodec(pb.DrafterVersion, SpeculationStats)},
        converters={"state": Converter(str, VersionState)},
    ),
)

_ADAPTER = MessageCodec(
    pb.Adapter,
    AdapterInfo,
    Options(
        {"speculation": MessageCodec(pb.Adapter, SpeculationStats)},
        converters={"state": Converter(str, AdapterState)},
    ),
)

CHANGE = MessageCodec(pb.SetSpeculationRequest, SpeculationChange, Options({"rules": _RULE}))
STATE = _StateCodec(
    pb.SpeculationState,
    SpeculationState,
    Options({"in_force": _VALUES, "without_rules": _VALUES, "configured": _VALUES, "rules": _RULE}),
)
REPLICA = MessageCodec(pb.ReplicaStatus, ReplicaStatus, Options({"report": _REPORT}))
STATUS = MessageCodec(
    pb.GetStatusResponse, ServiceStatus, Options({"replicas": REPLICA, "speculation": STATE})
)
AUDIT_PAGE = MessageCodec(pb.ListAuditLogResponse, AuditPage, Options({"entries": _ENTRY}))
FLEET = MessageCodec(
    pb.WatchStatsResponse,
    FleetStatistics,
    Options({"status": STATUS, "totals": _counts(pb.FleetTotals)}),
)
PROFILE_ORDER = MessageCodec(pb.ProfileRequest, ProfileOrder, Options(zero_is_default=True))
PROFILE = MessageCodec(pb.ProfileResponse, ProfileReport, Options({"workers": _WORKER}))
ADAPTER_LOAD = MessageCodec(pb.LoadAdapterRequest, AdapterOrder)
ADAPTERS = MessageCodec(pb.ReplicaAdapters, AdapterReport, Options({"adapters": _ADAPTER}))
SAMPLE_ORDER = MessageCodec(pb.TakeSamplesRequest, SampleOrder, Options(zero_is_default=True))
SAMPLES = MessageCodec(
    pb.ReplicaSamples,
    SampleBatch,
    Options({"samples": MessageCodec(pb.ServedSample, ServedSample)}),
)
DRAFTER_ORDER = MessageCodec(pb.SetDrafterRequest, DrafterOrder)
DRAFTERS = MessageCodec(pb.ReplicaDrafters, DrafterReport, Options({"versions": _VERSION}))
