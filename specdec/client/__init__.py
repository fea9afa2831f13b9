"""The Python client of the gRPC service.

The codec between protobuf messages and `specdec.types` is here too, as the service uses the same.
It needs neither torch nor the engine. Interfaces of the service belong in `cluster.api`.
"""

from specdec.client.admin_client import AdminClient
from specdec.client.async_client import AsyncClient
from specdec.client.errors import ClientError
from specdec.client.sync_client import Client
from specdec.types.adapters import AdapterInfo, AdapterOrder, AdapterReport
from specdec.types.control import (
    CONTROL_VALUES,
    DEFAULT_AUDIT_PAGE,
    MAX_AUDIT_PAGE,
    AuditEntry,
    AuditPage,
    SpeculationChange,
    SpeculationPreview,
    SpeculationState,
    StateStamp,
)
from specdec.types.drafters import DrafterOrder, DrafterReport, DrafterVersion
from specdec.types.reports.fleet import (
    DecisionNews,
    FleetStatistics,
    ReplicaReport,
    ReplicaStatus,
    ServiceStatus,
)
from specdec.types.reports.profile import OperationTime, ProfileOrder, ProfileReport, WorkerProfile
from specdec.types.reports.stats import Counts, HistogramCounts
from specdec.types.responses import (
    Choice,
    Completion,
    ModelInfo,
    PositionLogprobs,
    Prompt,
    StreamChunk,
    TokenizedInput,
    TokenLogprob,
    Usage,
)
from specdec.types.samples import SampleBatch, SampleOrder, ServedSample

__all__ = [
    "CONTROL_VALUES",
    "DEFAULT_AUDIT_PAGE",
    "MAX_AUDIT_PAGE",
    "AdapterInfo",
    "AdapterOrder",
    "AdapterReport",
    "AdminClient",
    "AsyncClient",
    "AuditEntry",
    "AuditPage",
    "Choice",
    "Client",
    "ClientError",
    "Completion",
    "Counts",
    "DecisionNews",
    "DrafterOrder",
    "DrafterReport",
    "DrafterVersion",
    "FleetStatistics",
    "HistogramCounts",
    "ModelInfo",
    "OperationTime",
    "PositionLogprobs",
    "ProfileOrder",
    "ProfileReport",
    "Prompt",
    "ReplicaReport",
    "ReplicaStatus",
    "SampleBatch",
    "SampleOrder",
    "ServedSample",
    "ServiceStatus",
    "SpeculationChange",
    "SpeculationPreview",
    "SpeculationState",
    "StateStamp",
    "StreamChunk",
    "TokenLogprob",
    "TokenizedInput",
    "Usage",
    "WorkerProfile",
]
