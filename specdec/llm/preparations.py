"""Requests whose prompts are being encoded and grammars compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(eq=False)
class Preparation:
    """A request that is being prepared. Its id need not be unique."""

    request_id: str
    is_aborted: bool = False


class Preparations:
    """Requests that can be aborted before they reach the engine, on one event loop."""

    def __init__(self) -> None:
        self._open: set[Preparation] = set()

    @contextmanager
    def begin(self, request_id: str) -> Iterator[Preparation]:
        """Register a request while it is prepared."""
        preparation = Preparation(request_id)
        self._open.add(preparation)
        try:
            yield preparation
        finally:
            self._open.discard(preparation)

    def abort(self, request_id: str) -> None:
        """Mark the requests with this id as aborted."""
        for preparation in self._open:
            preparation.is_aborted |= preparation.request_id == request_id
