"""Deadlines of streams that hold even if gRPC does not report their end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

from specdec.client.attempts import Attempts

_MAX_WAITING = 1000
"""Messages that are received before they are read; beyond them gRPC's flow control applies."""
_POLL_S = 0.01


class _End(NamedTuple):
    error: Exception | None


def receive(
    call: Any, attempts: Attempts, stall_s: float | None = None
) -> Generator[Any, None, None]:
    """Yield the messages of a stream of `grpc`, which a thread receives; cancel it at the end.

    stall_s: limit of the time until the next message. Raises the errors of the call, and
    TimeoutError after a time limit, whether or not gRPC has ended the call.
    """
    messages: SimpleQueue[Any] = SimpleQueue()
    Thread(target=_put_all, args=(call, messages), name="specdec-stream", daemon=True).start()
    get = messages.get
    try:
        while True:
            message = get(timeout=attempts.wait_s if stall_s is None else stall_s)
            if message.__class__ is _End:
                break
            yield message
        if message.error is not None:
            raise message.error
    except Empty:
        raise TimeoutError from None
    finally:
        call.cancel()  # no effect on a call that has ended


def _put_all(call: Any, messages: SimpleQueue[Any]) -> None:
    try:
        for message in call:
            messages.put(message)
            while messages.qsize() >= _MAX_WAITING and call.is_active():
                time.sleep(_POLL_S)
        messages.put(_End(None))
    except Exception as error:
        messages.put(_End(error))


class TaskWatch:
    """Time limit of the waits of an asynchronous generator, without `asyncio.timeout` in each."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None  # that waits
        self._is_over = False

    @contextmanager
    def within(self, wait_s: float | None) -> Iterator[None]:
        """Raise TimeoutError in place of the cancellation of a wait after the limit."""
        loop = asyncio.get_running_loop()
        timer = None if wait_s is None else loop.call_later(wait_s, self._expire)
        try:
            yield
        except asyncio.CancelledError:
            if not self._is_over or self._task is None or self._task.uncancel() > 0:
                raise
            raise TimeoutError from None
        finally:
            if timer is not None:
                timer.cancel()

    def begin_wait(self) -> None:
        """Record that the current task waits from now on. Raises TimeoutError after the limit."""
        if self._is_over:
            raise TimeoutError
        self._task = asyncio.current_task()

    def end_wait(self) -> None:
        """Record that no task waits."""
        self._task = None

    def _expire(self) -> None:
        self._is_over = True
        if self._task is not None:
            self._task.cancel()
