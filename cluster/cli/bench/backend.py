"""The interface of the APIs that `specdec bench serve` can measure, and the gRPC backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from cluster.cli.bench.dataset import SampleRequest
from specdec.client import Client, ClientError
from specdec.types.reports.stats import SpeculationStats
from specdec.types.request import ChatMessage
from specdec.types.responses import StreamChunk
from specdec.types.sampling.sampling_params import SamplingParams


class RequestFailedError(Exception):
    """A request was rejected or its stream failed. kind: a short text to count failures by."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


@dataclass(frozen=True)
class TokenUsage:
    """Token counts of a request. speculation: None if the service does not report it."""

    prompt_tokens: int
    completion_tokens: int
    speculation: SpeculationStats | None = None


@dataclass(frozen=True)
class StreamEvent:
    """One message of a stream. usage: only in one message, if the service reports it."""

    has_tokens: bool
    usage: TokenUsage | None = None


class Backend(Protocol):
    """A connection to a service; thread-safe."""

    @property
    def model(self) -> str:
        """The name of the served model."""
        ...

    def stream(self, request: SampleRequest) -> Iterator[StreamEvent]:
        """Send a request and yield its events. Raises RequestFailedError at any time."""
        ...

    def close(self) -> None:
        """Close all connections, which ends running streams."""
        ...


class GrpcBackend:
    """Sends prompts as chat messages over gRPC. Failed streams are not resumed."""

    def __init__(
        self,
        address: str,
        options: SamplingParams,
        *,
        timeout_s: float | None,
        api_key: str | None = None,
        tls_ca_file: Path | None = None,
    ) -> None:
        """Connect and request the name of the served model. Raises ClientError."""
        self._client = Client(
            address, timeout_s=timeout_s, tls_ca_file=tls_ca_file, api_key=api_key
        )
        self._options = options
        self.model = self._client.model_info().model

    def stream(self, request: SampleRequest) -> Iterator[StreamEvent]:
        """Send a chat request and yield its events."""
        chat = [ChatMessage("user", request.prompt)]
        params = replace(self._options, max_tokens=request.max_tokens)
        try:
            for chunk in self._client.generate_stream(
                chat, params, cache_salt=request.cache_salt, resume=False
            ):
                yield _event(chunk)
        except ClientError as error:
            raise RequestFailedError(error.code.name) from error

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def _event(chunk: StreamChunk) -> StreamEvent:
    if (usage := chunk.usage) is None:
        return StreamEvent(bool(chunk.token_ids))
    counts = TokenUsage(usage.prompt_tokens, usage.completion_tokens, usage.speculation)
    return StreamEvent(bool(chunk.token_ids), counts)
