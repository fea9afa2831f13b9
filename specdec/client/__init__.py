"""The Python client of the gRPC service. Light: it needs neither torch nor the engine."""

from specdec.client.admin_client import AdminClient
from specdec.client.admin_messages import (
    ReplicaReport,
    ReplicaStatus,
    ServiceStatus,
    SpeculationChange,
    SpeculationState,
)
from specdec.client.errors import ClientError
from specdec.client.messages import (
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
from specdec.client.sync_client import Client

__all__ = [
    "AdminClient",
    "Choice",
    "Client",
    "ClientError",
    "Completion",
    "ModelInfo",
    "PositionLogprobs",
    "Prompt",
    "ReplicaReport",
    "ReplicaStatus",
    "ServiceStatus",
    "SpeculationChange",
    "SpeculationState",
    "StreamChunk",
    "TokenLogprob",
    "TokenizedInput",
    "Usage",
]
