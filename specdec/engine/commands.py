"""Calls that are queued for the engine's thread, and their results."""

from __future__ import annotations

import asyncio
import logging
import queue
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from specdec.types.errors import as_exception

logger = logging.getLogger(__name__)


class Command(NamedTuple):
    """A call to run on the engine's thread.

    result: receives its return value or error. on_end: called there with its error, if any.
    is_brief: its result may wait for those of brief commands after it, with which it is returned.
    is_silent: only an error is returned.
    """

    function: Callable[[], Any]
    result: asyncio.Future[Any] | None = None
    on_end: Callable[[Exception | None], None] | None = None
    is_brief: bool = False
    is_silent: bool = False

    def run(self, failure: Exception | None) -> Outcome:
        """Call the function and return the outcome; `failure`, if given, is raised instead."""
        try:
            if failure is not None:
                raise failure
            return Outcome(self, self.function())
        except BaseException as fault:
            error = as_exception(fault)
            if self.result is None and self.on_end is None and error is not failure:
                logger.exception("a command without a caller failed")
            return Outcome(self, None, error)


class Outcome(NamedTuple):
    """A command's return value, or its error."""

    command: Command
    value: Any
    error: Exception | None = None


class CommandQueue:
    """Commands of one thread, in order. None stands for the end of the thread.

    The thread takes a command as soon as it looks for one. While it waits, the commands of one
    iteration of the event loop wake it once, so that they share a step and its overhead.
    """

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self._event_loop = event_loop
        self._commands: deque[Command | None] = deque()
        self._is_waiting = False  # set before the thread looks for a last time
        self._is_wake_due = False
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()  # one too many does no harm

    def put(self, command: Command | None) -> None:
        """Add a command, and wake the thread. Thread-safe."""
        self._commands.append(command)
        self._wake()

    def put_with_others(self, command: Command) -> None:
        """Add a command, and wake the thread at the end of the event loop's iteration."""
        self._commands.append(command)
        if not self._is_wake_due:
            self._is_wake_due = True
            self._event_loop.call_soon(self._wake_due)

    def __bool__(self) -> bool:
        return bool(self._commands)

    def get(self) -> Command | None:
        """Return the next command, of which there is one."""
        return self._commands.popleft()

    def drain(self) -> Iterator[Command | None]:
        """Remove all commands. Thread-safe."""
        with suppress(IndexError):
            while True:
                yield self._commands.popleft()

    def wait(self, timeout_s: float | None) -> None:
        """Wait for a command; it may return without one. timeout_s: None for no limit."""
        self._is_waiting = True
        if not self._commands:
            with suppress(queue.Empty):
                self._wakes.get(timeout=timeout_s)
        self._is_waiting = False

    def _wake_due(self) -> None:
        self._is_wake_due = False
        self._wake()

    def _wake(self) -> None:
        if self._is_waiting:
            self._is_waiting = False
            self._wakes.put(None)


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
