"""The interface of the APIs that `specdec bench serve` can measure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from cluster.cli.bench.dataset import SampleRequest
from specdec.types.stats import SpeculationStats


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
