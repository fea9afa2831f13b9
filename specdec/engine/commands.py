"""Calls that are queued for the engine's thread, and their results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Command:
    """A call to run on the engine's thread.

    result: receives its return value or error. on_end: called there with its error, if any.
    """

    function: Callable[[], Any]
    result: asyncio.Future[Any] | None = None
    on_end: Callable[[Exception | None], None] | None = None

    @property
    def has_no_caller(self) -> bool:
        """Return whether an error is returned to no caller."""
        return self.result is None and self.on_end is None


class Outcome(NamedTuple):
    """A command's return value, or its error."""

    command: Command
    value: Any
    error: Exception | None = None


def settle(outcomes: Sequence[Outcome]) -> None:
    """Return the outcomes of commands to their callers. On the event loop."""
    for command, value, error in outcomes:
        result = command.result
        if result is None or result.done():
            continue
        if error is None:
            result.set_result(value)
        else:
            result.set_exception(error)
