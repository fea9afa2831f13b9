"""The Python client of the gRPC service. Light: it needs neither torch nor the engine."""

from specdec.client.errors import ClientError
from specdec.client.messages import (
    Completion,
    ModelInfo,
    Prompt,
    StreamChunk,
    TokenizedInput,
    Usage,
)
from specdec.client.sync_client import Client

__all__ = [
    "Client",
    "ClientError",
    "Completion",
    "ModelInfo",
    "Prompt",
    "StreamChunk",
    "TokenizedInput",
    "Usage",
]
