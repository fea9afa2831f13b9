"""Requests on their way to the engine, whose prompts are encoded and grammars compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(eq=False)
class Preparation:
    """One of them. Its id need not be unique."""

    request_id: str
    is_aborted: bool = False


class Preparations:
    """Where an abort finds requests of which the engine has not heard; of one event loop."""

    def __init__(self) -> None:
        self._open: set[Preparation] = set()

    @contextmanager
    def begin(self, request_id: str) -> Iterator[Preparation]:
        """Registers a request for as long as it is prepared."""
        preparation = Preparation(request_id)
        self._open.add(preparation)
        try:
            yield preparation
        finally:
            self._open.discard(preparation)

    def abort(self, request_id: str) -> None:
        """Marks those of this id."""
        for preparation in self._open:
            preparation.is_aborted |= preparation.request_id == request_id
