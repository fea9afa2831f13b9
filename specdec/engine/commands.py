"""Calls that are queued for the engine's thread, and their results."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Command:
    """A call to run on the engine's thread.

    result: receives its return value or error. on_end: called there with its error, if any.
    is_brief: its result may wait for those of brief commands after it, with which it is returned.
    """

    function: Callable[[], Any]
    result: asyncio.Future[Any] | None = None
    on_end: Callable[[Exception | None], None] | None = None
    is_brief: bool = False

    def run(self, failure: Exception | None) -> Outcome:
        """Call the function and return the outcome; `failure`, if given, is raised instead."""
        try:
            if failure is not None:
                raise failure
            return Outcome(self, self.function())
        except Exception as error:
            if self.result is None and self.on_end is None and error is not failure:
                logger.exception("a command without a caller failed")
            return Outcome(self, None, error)


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


def refuse(command: Command, error: Exception, notify: Callable[..., None]) -> None:
    """Return an error for a command that does not run. notify: calls on the event loop."""
    if command.on_end is None:
        notify(settle, [Outcome(command, None, error)])
    else:
        command.on_end(error)
