"""What a service is asked through, and what is heard of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from cluster.cli.bench.questions import Question
from specdec.types.stats import SpeculationStats


class RequestFailedError(Exception):
    """A request that was refused, or whose answer broke off. kind: a few words to count it by."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


@dataclass(frozen=True)
class TokenUsage:
    """What a request took, in tokens. speculation: None where the service does not tell."""

    prompt_tokens: int
    completion_tokens: int
    speculation: SpeculationStats | None = None


@dataclass(frozen=True)
class Heard:
    """One message of an answer. usage: in one of them, where the service tells it."""

    brings_tokens: bool
    usage: TokenUsage | None = None


class Backend(Protocol):
    """A way to a service; used by many threads at once."""

    @property
    def model(self) -> str:
        """What the service calls the model."""
        ...

    def ask(self, question: Question) -> Iterator[Heard]:
        """Streams an answer. Raises RequestFailedError, at any moment."""
        ...

    def close(self) -> None:
        """Ends the connections, and with them what is still being answered."""
        ...
