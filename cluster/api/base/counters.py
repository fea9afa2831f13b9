"""Counters of limits: in this process, or together with others (`cluster.api.front_ends`)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol


class Counter(Protocol):
    """A number to which this process adds. total: of all processes that share it."""

    @property
    def total(self) -> int: ...

    def add(self, count: int) -> None:
        """Add to the part of this process."""


class OwnCounter:
    """A counter of one process."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, count: int) -> None:
        """See Counter."""
        self.total += count


class Bucket(Protocol):
    """Content of a token bucket, and when it was filled last, by `time.monotonic`."""

    remaining: float
    filled_at_s: float


@dataclass
class OwnBucket:
    """A bucket of one process."""

    remaining: float = 0.0
    filled_at_s: float = 0.0


@dataclass(frozen=True)
class KeyCounters:
    """The counters of an API key. lock: held while a request is checked and counted."""

    running: Counter = field(default_factory=OwnCounter)
    bucket: Bucket = field(default_factory=OwnBucket)
    lock: AbstractContextManager[object] = field(default_factory=nullcontext)
